"""The server of ``asyncrl-view``: its page, the answers as JSON and the reports of the runs, on loopback.

Invariant: it answers GET alone, and only requests whose Host is a name of this machine. So a website whose name was
pointed at loopback reads nothing. The browser may load only this server's own files, and runs inline scripts only in a
report. An answer above MOST_BYTES is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from asyncrl.core.errors import UsageError
from asyncrl.core.formatting import printable
from asyncrl.observe.pages import UPLOT_SCRIPT, UPLOT_STYLE, resource_text
from asyncrl.view.answers import Answers, BadRequest, NotFound
from asyncrl.view.page import PAGE

LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "::1"})
"""Names of this machine in a browser's address. Any port: the user may reach it through a tunnel."""
MOST_BYTES = 32 << 20
SHUTDOWN_S = 1.0
FILES = {
    "/": (PAGE, "text/html"),
    "/view.js": ("view/view.js", "text/javascript"),
    "/view.css": ("view/view.css", "text/css"),
    "/uplot.js": (UPLOT_SCRIPT, "text/javascript"),
    "/uplot.css": (UPLOT_STYLE, "text/css"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REPORT_HEADERS = HEADERS | {"Content-Security-Policy": "frame-ancestors 'none'"}
"""The page of a report has the rest of its policy itself."""


class ViewServer:
    """Serves the page until ``close``. ``report`` makes the page of a run's report, by the number of the run."""

    def __init__(self, answers: Answers, report: Callable[[int], str]) -> None:
        self._answers, self._report = answers, report
        self._runner: web.ServerRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listen on ``port`` of loopback; 0 takes a free one. Returns the URL. Raises OSError."""
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, port).start()
        return f"http://{LOOPBACK}:{self._runner.addresses[0][1]}/"

    async def close(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not _is_local(request.headers.get("Host", "")):
            return _refusal(421, "this server answers only under a name of this machine: use the printed URL")
        if request.method != "GET":
            return _refusal(405, "only GET is served here")
        if request.path in FILES:
            name, kind = FILES[request.path]
            return web.Response(text=resource_text(name), content_type=kind, charset="utf-8", headers=HEADERS)
        parameters = dict(request.query)
        folder, _, name = request.path.removeprefix("/").partition("/")
        try:
            if folder == "report":
                page = await asyncio.to_thread(self._report, self._answers.run_of(parameters))
                # A name in the run may contain bytes that are no text.
                body = page.encode("utf-8", "backslashreplace")
                return web.Response(body=body, content_type="text/html", charset="utf-8", headers=REPORT_HEADERS)
            if folder != "api":
                return _refusal(404, "there is no such page")
            body = await asyncio.to_thread(self._encode, name, parameters)
        except BadRequest as error:
            return _refusal(400, str(error))
        except (NotFound, UsageError) as error:
            return _refusal(404, printable(str(error)))
        except OSError as error:
            return _refusal(500, printable(f"{error.filename}: {error.strerror}"))
        if len(body) > MOST_BYTES:
            return _refusal(500, f"the answer has {len(body)} bytes, above the limit of {MOST_BYTES}")
        return web.Response(body=body, content_type="application/json", headers=HEADERS)

    def _encode(self, name: str, parameters: dict[str, str]) -> bytes:
        return msgspec.json.encode(self._answers.answer(name, parameters))


def _is_local(host: str) -> bool:
    """Whether a Host header is a name of this machine, with any port."""
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:
        return False


def _refusal(status: int, problem: str) -> web.Response:
    body = msgspec.json.encode({"error": problem})
    return web.Response(status=status, body=body, content_type="application/json", headers=HEADERS)

"""The server of ``asyncrl-view``: its page and the answers as JSON, on loopback.

Invariant: it answers GET alone, and only requests whose Host is a name of this machine. So a website whose name was
pointed at loopback reads nothing. The browser may load only this server's own files, and runs no inline script. An
answer above MOST_BYTES is refused.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from asyncrl.core.printable import printable
from asyncrl.view.answers import Answers, BadRequest, NotFound
from asyncrl.view.page import resource_text

LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "::1"})
"""Names of this machine in a browser's address. Any port: the user may reach it through a tunnel."""
MOST_BYTES = 32 << 20
SHUTDOWN_S = 1.0
FILES = {
    "/": ("index.html", "text/html"),
    "/view.js": ("view.js", "text/javascript"),
    "/view.css": ("view.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer:
    """Serves the page until ``close``."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
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
        folder, _, name = request.path.removeprefix("/").partition("/")
        if folder != "api":
            return _refusal(404, "there is no such page")
        try:
            body = await asyncio.to_thread(self._encode, name, dict(request.query))
        except BadRequest as error:
            return _refusal(400, str(error))
        except NotFound as error:
            return _refusal(404, str(error))
        except OSError as error:
            return _refusal(500, printable(f"{error.filename}: {error.strerror}"))
        if len(body) > MOST_BYTES:
            return _refusal(500, f"the answer has {len(body)} bytes, above the limit of {MOST_BYTES}")
        return web.Response(body=body, content_type="application/json", headers=HEADERS)

    def _encode(self, name: str, parameters: dict[str, str]) -> bytes:
        return msgspec.json.encode(self._answers.answer(name, parameters))


def _is_local(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:
        return False


def _refusal(status: int, problem: str) -> web.Response:
    body = msgspec.json.encode({"error": problem})
    return web.Response(status=status, body=body, content_type="application/json", headers=HEADERS)

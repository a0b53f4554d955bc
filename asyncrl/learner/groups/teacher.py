"""A client of a teacher on a server: it requests the log-probs of tokens of a sequence.

The client calls ``/completions`` of an OpenAI-compatible server. The server must return log-probs of a prompt of token
ids, at temperature 1, as vLLM does with ``prompt_logprobs``
(https://docs.vllm.ai/en/latest/api/vllm/entrypoints/openai/completion/protocol/).

Invariant: the result has for each requested token the log-prob of the same id, a finite number of at most 0. Anything
else is an error that names the URL. Redirects are not followed, so that no other server gets the key. No more than
MOST_BYTES of a reply are read.

Fails with TeacherFailed, which says whether the request may be repeated.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncrl.config.algorithm import TeacherServerConfig

if TYPE_CHECKING:
    import aiohttp

MOST_BYTES = 256 << 20
CONNECT_S = 10.0
"""Longest time until a connection is open (s)."""
ABOVE_ZERO = 1e-4
"""Largest log-prob (nats) that counts as 0: rounding may leave one above 0."""
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP statuses after which the same request may succeed later."""


class TeacherFailed(Exception):
    """The server gave no log-probs. ``passing``: the same request may succeed later."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        self.reason, self.passing = reason, passing
        super().__init__(reason)


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _ScoredPrompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _ScoredPrompts(msgspec.Struct):
    choices: list[_ScoredPrompt]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Text(msgspec.Struct):
    prompt: str


class TeacherClient:
    """A client of the server at ``url``. Make it and use it in one event loop; ``close`` ends it."""

    def __init__(self, url: str, config: TeacherServerConfig) -> None:
        import aiohttp

        self._http = aiohttp
        """The module: it is imported only if a run has a teacher on a server."""
        self.url = url.rstrip("/").removesuffix("/completions")
        self._config = config
        self._model = config.model
        """Name of the model in requests; None until the server has named its only one."""
        self._session: aiohttp.ClientSession | None = None
        """Connections to the server; None before the first request."""

    async def model(self) -> tuple[str, int | None]:
        """Ask the server for the configured model, or for its only one; later requests name this model.

        Returns its name and the longest sequence that the server accepts, None if the server does not say. Raises
        TeacherFailed.
        """
        models: _Models = _read(await self._ask("GET", f"{self.url}/models"), _Models, f"{self.url}/models")
        named = [each for each in models.data if self._model in (None, each.id)]
        if not named:
            served = ", ".join(each.id for each in models.data) or "none"
            wanted = "" if self._model is None else f" {self._model!r}; it serves {served}"
            raise TeacherFailed(f"{self.url} serves no model{wanted}", passing=False)
        if self._model is None and len(named) > 1:
            served = ", ".join(each.id for each in named)
            problem = f"{self.url} serves several models ({served}); name one in learner.teacher_server.model"
            raise TeacherFailed(problem, passing=False)
        self._model = named[0].id
        return named[0].id, named[0].max_model_len

    async def text(self, ids: Sequence[int]) -> str | None:
        """Let the server decode token ids into text; None if ``/detokenize`` fails. Raises the error of ``model``."""
        if self._model is None:
            await self.model()
        url = f"{self.url.removesuffix('/v1')}/detokenize"
        body = {"model": self._model, "tokens": list(ids)}
        try:
            decoded: _Text = _read(await self._ask("POST", url, body), _Text, url)
        except TeacherFailed:
            return None
        return decoded.prompt

    async def logprobs(self, ids: Sequence[int], places: np.ndarray) -> np.ndarray:
        """Request log-probs of the tokens of ``ids`` at these positions, which are above 0: float64 [S], nats.

        Raises TeacherFailed.
        """
        if self._model is None:
            await self.model()
        url = f"{self.url}/completions"
        # Servers require at least one token to sample; it is not used.
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer: _ScoredPrompts = _read(await self._ask("POST", url, body), _ScoredPrompts, url)
        scored = answer.choices[0].prompt_logprobs if answer.choices else None
        if scored is None:
            problem = "answers without prompt_logprobs: it must be a server that scores prompts, as vLLM's"
            raise TeacherFailed(f"{url} {problem}", passing=False)
        if len(scored) != len(ids):
            problem = f"answers with log-probs of {len(scored)} tokens where {len(ids)} were asked for"
            raise TeacherFailed(f"{url} {problem}", passing=True)
        return np.array([self._value(url, ids, scored, int(place)) for place in places], np.float64)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _value(self, url: str, ids: Sequence[int], scored: Sequence[dict[str, _Logprob] | None], place: int) -> float:
        """Return the log-prob of the token at ``place``, at most 0. Raises TeacherFailed if it is invalid."""
        of_token = (scored[place] or {}).get(str(ids[place]))
        if of_token is None:
            raise TeacherFailed(f"{url} answers without the log-prob of token {place}, id {ids[place]}", passing=False)
        value = of_token.logprob
        if value is None or not math.isfinite(value) or value > ABOVE_ZERO:
            problem = f"answers with {value} as the log-prob of token {place}, id {ids[place]}"
            raise TeacherFailed(f"{url} {problem}", passing=value is None or not math.isfinite(value))
        return min(value, 0.0)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> bytes:
        """Send an HTTP request and return the body of the reply. Raises TeacherFailed for every failure."""
        headers = {"Content-Type": "application/json"}
        if self._config.api_key_env:
            # A key that was read from a file may end with a newline, which a header cannot hold.
            headers["Authorization"] = f"Bearer {os.environ.get(self._config.api_key_env, '').strip()}"
        data = msgspec.json.encode(body) if body is not None else None
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._open().request(method, url, data=data, headers=headers, allow_redirects=False) as response,
            ):
                status, answer = response.status, await _read_all(response, url)
        except self._http.ServerTimeoutError as error:
            raise TeacherFailed(f"{url} takes no connection within {CONNECT_S:g} s", passing=True) from error
        except TimeoutError as error:
            problem = f"has not answered within learner.teacher_server.timeout_s = {self._config.timeout_s:g} s"
            raise TeacherFailed(f"{url} {problem}", passing=True) from error
        except (self._http.ClientError, OSError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TeacherFailed(f"{url} cannot be reached: {problem}", passing=True) from error
        except ValueError as error:
            # aiohttp raises it for an invalid header, or one that conflicts with the host's entry in .netrc.
            problem = f"cannot be asked: {error}; look at learner.teacher_server.api_key_env, and at the host in .netrc"
            raise TeacherFailed(f"{url} {problem}", passing=False) from error
        if status != 200:
            body_text = " ".join(answer[:400].decode(errors="replace").split())
            raise TeacherFailed(f"{url} answers with status {status}: {body_text}", passing=status in PASSING)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        """Return the session, which the first call makes."""
        if self._session is None:
            self._session = self._http.ClientSession(
                # The caller decides on the number of connections at once.
                connector=self._http.TCPConnector(limit=0),
                timeout=self._http.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=self._http.DummyCookieJar(),
                trust_env=True,
            )
        return self._session


async def _read_all(response: aiohttp.ClientResponse, url: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > MOST_BYTES:
            raise TeacherFailed(f"{url} answers with more than {MOST_BYTES} bytes", passing=False)
        parts.append(part)
    return b"".join(parts)


def _read(data: bytes, kind: Any, url: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TeacherFailed(f"{url} answers with what cannot be read: {error}", passing=True) from None

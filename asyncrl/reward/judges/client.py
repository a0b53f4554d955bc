"""A judge's server, over HTTP: one request, one answer.

Fails with AskFailed, which says whether the same may be asked again, and when. Nothing that comes back is longer than
MOST_BYTES; no redirect is followed, so that the key goes nowhere else. A server that takes no JSON schema is asked
without one from then on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.reward.judges.options import JudgeOptions

if TYPE_CHECKING:
    import aiohttp

MOST_BYTES = 4 << 20
CONNECT_S = 30.0
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses that say nothing about the request."""
WITHOUT_SCHEMA, SCHEMA_WORDS = (400, 404, 415, 422, 501), ("response_format", "json_schema", "schema", "grammar")
"""Statuses and words by which servers refuse response_format."""


class AskFailed(Exception):
    """No answer. ``kind`` is short, ``pause_s`` is what the server asks for, None where it asks for nothing."""

    def __init__(self, kind: str, reason: str, *, passing: bool, pause_s: float | None = None) -> None:
        self.kind, self.reason, self.passing, self.pause_s = kind, reason, passing, pause_s
        super().__init__(reason)


class SchemaRefused(AskFailed):
    """The server takes no JSON schema, and is asked without one from here on."""


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    choices: list[_JudgeChoice]
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's answer. Tokens are as its server counts them; 0 where it does not."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool
    """Whether the text ends by the longest that the server was asked for, or has room for."""


class JudgeClient:
    """Asks one model. Made and used in one event loop."""

    def __init__(self, options: JudgeOptions) -> None:
        import aiohttp

        self._http = aiohttp
        base = options.url.rstrip("/")
        self._url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self._options = options
        self._takes_schema = "response_format" not in options.extra
        self._session: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Reply)

    async def ask(self, messages: Sequence[dict[str, str]], schema: dict[str, Any]) -> JudgeReply:
        """The model's answer. Raises AskFailed, SchemaRefused; the caller keeps the time."""
        body: dict[str, Any] = {"model": self._options.model, "messages": list(messages), **self._options.extra}
        takes_schema = self._takes_schema
        if takes_schema:
            format = {"name": "judgement", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": format}
        headers = {"Content-Type": "application/json"}
        if self._options.api_key_env:
            # One that was read from a file may end with a newline, which no header takes.
            headers["Authorization"] = f"Bearer {os.environ.get(self._options.api_key_env, '').strip()}"
        try:
            async with self._open().post(
                self._url, data=msgspec.json.encode(body), headers=headers, allow_redirects=False
            ) as response:
                data = await self._read(response)
                status, pause_s = response.status, _retry_after(response.headers.get("Retry-After"))
        except (self._http.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, self._http.ClientError):
                raise
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise AskFailed("unreachable", f"{self._url} cannot be reached: {told}", passing=True) from error
        except ValueError as error:
            # aiohttp's for a header that it does not send, or that an entry of .netrc for the host contradicts.
            told = f"cannot be asked: {error}; look at reward.options.api_key_env, and at the host in .netrc"
            raise AskFailed("no request", f"{self._url} {told}", passing=False) from error
        if status != 200:
            said = " ".join(data[:400].decode(errors="replace").split())
            told = f"{self._url} answers with status {status}: {said}"
            if takes_schema and status in WITHOUT_SCHEMA and any(word in said for word in SCHEMA_WORDS):
                self._takes_schema = False
                raise SchemaRefused("no schema", told, passing=True)
            raise AskFailed(f"status {status}", told, passing=status in PASSING, pause_s=pause_s)
        return self._answer(data)

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(1 << 16):
            size += len(part)
            if size > MOST_BYTES:
                raise AskFailed("too long", f"{self._url} answers with more than {MOST_BYTES} bytes", passing=False)
            parts.append(part)
        return b"".join(parts)

    def _answer(self, data: bytes) -> JudgeReply:
        try:
            reply = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            told = f"{self._url} answers with what is no chat completion: {error}"
            raise AskFailed("no chat completion", told, passing=True) from None
        if not reply.choices:
            raise AskFailed("no chat completion", f"{self._url} answers with no choice", passing=True)
        choice, usage = reply.choices[0], reply.usage or _Usage()
        text, cut = choice.message.content or choice.message.refusal or "", choice.finish_reason == "length"
        return JudgeReply(text, usage.prompt_tokens, usage.completion_tokens, cut)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self._http.ClientSession(
                # Their number at once is decided elsewhere (limits.py), and so is the time that one may take.
                connector=self._http.TCPConnector(limit=0),
                timeout=self._http.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=self._http.DummyCookieJar(),
                trust_env=True,
            )
        return self._session


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (RFC 9110, 10.2.3); None without one, and for one that cannot be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        # A date with the zone -0000 is read as one without a zone.
        seconds = (when - datetime.now(UTC)).total_seconds() if when.tzinfo is not None else 0.0
    # float() reads nan, which equals nothing.
    return max(0.0, seconds) if seconds == seconds else None

"""Sends the policy's answer, and keeps the connection alive until there is one.

Signs of life are blanks in front of a body of JSON, or comments in a stream; clients ignore both. The first sign sends
the status 200, so a later failure cuts the connection or is an event. Every write has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from asyncrl.episodes.http.calls import Call, Patience
from asyncrl.episodes.http.dialect import Body, ChatRequest, Dialect, Failure, ReplyStream, Stamp

BLANK = b" "
COMMENT = b": the policy is being asked\n\n"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"


class CutConnection(Exception):
    """The connection must be cut."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncIterator[None]:
    """Raise CutConnection if a write in the context takes longer than ``timeout_s``.

    The kernel's buffer is bounded, so a slow write means that the client does not read.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise CutConnection("slow reader") from None


async def send(
    request: web.BaseRequest, body: Body, status: int, *, timeout_s: float, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """Send ``body`` as the whole answer. Raises CutConnection."""
    raw = msgspec.json.encode(body)
    response = web.Response(body=raw, status=status, headers={"Content-Type": JSON, **(headers or {})})
    async with _in_time(timeout_s):
        await response.prepare(request)
        await response.write_eof()
    return response


class HttpAnswer:
    """Sends the answer to one request, by ``whole`` or by ``stream``, once.

    ``count_failure`` counts an error of the call, and returns the failure for the client. ``news`` is an event that is
    set when the call has new text and when it ends.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        asked: ChatRequest,
        call: Call,
        *,
        model: str,
        count_failure: Callable[[Exception], Failure],
        patience: Patience,
    ) -> None:
        self._request, self._dialect, self._asked, self._call = request, dialect, asked, call
        self._model = model
        self._count_failure = count_failure
        self._keep_alive_s, self._timeout_s = patience.keep_alive_s, patience.client_timeout_s
        self._response: web.StreamResponse | None = None
        """Response whose status was sent; None before that."""
        self._sent = [0] * asked.n
        """For each choice, the number of characters of its content that were sent."""

    async def whole(self, news: asyncio.Event) -> web.StreamResponse:
        """Wait for the outcome, with blanks as signs of life, and send it as one body of JSON. Raises CutConnection."""
        while self._call.running:
            if not await self._wait_for_news(news):
                await self._write(BLANK, JSON)
        outcome = self._call.outcome
        assert outcome is not None
        if not isinstance(outcome, Exception):
            body = self._dialect.reply(self._asked, self._stamp(), outcome)
            if self._response is None:
                return await send(self._request, body, 200, timeout_s=self._timeout_s, headers=self._notices())
            return await self._finish(msgspec.json.encode(body))
        if self._response is not None:
            # The status 200 was sent already: only count the failure. A retry of the client gets its status.
            self._count_failure(outcome)
            raise CutConnection("failed late")
        return await self._fail(self._count_failure(outcome))

    async def stream(self, news: asyncio.Event) -> web.StreamResponse:
        """Send content as events while it is sampled, then the end or the failure. Raises CutConnection.

        A failure before the first event or comment is sent as a status.
        """
        events: ReplyStream | None = None
        while self._call.running:
            alive = await self._wait_for_news(news)
            unsent = self._take_unsent()
            if unsent and events is None:
                events = self._dialect.events(self._asked, self._stamp())
            if unsent and events is not None:
                await self._write(b"".join(events.text(choice, text) for choice, text in unsent), EVENT_STREAM)
            elif not alive:
                await self._write(COMMENT, EVENT_STREAM)
        outcome = self._call.outcome
        assert outcome is not None
        events = events or self._dialect.events(self._asked, self._stamp())
        if not isinstance(outcome, Exception):
            choices = zip(outcome, self._call.texts, self._sent, strict=True)
            # Sent text cannot be taken back: the stream fails if a reply does not begin with its sent text.
            if all(reply.content.startswith(text[:sent]) for reply, text, sent in choices):
                return await self._finish(events.end(outcome))
            outcome = ValueError("the answer is not what was streamed of it")
        if self._response is None:
            return await self._fail(self._count_failure(outcome))
        return await self._finish(events.failed(self._count_failure(outcome)))

    async def _wait_for_news(self, news: asyncio.Event) -> bool:
        """Wait until the call has news. Returns False after ``keep_alive_s`` without any: a sign of life is due."""
        try:
            async with asyncio.timeout(self._keep_alive_s):
                await news.wait()
        except TimeoutError:
            return False
        news.clear()
        return True

    def _take_unsent(self) -> list[tuple[int, str]]:
        """Return the content that was not sent yet, as (choice, text), and count it as sent."""
        unsent = [(at, text[self._sent[at] :]) for at, text in enumerate(self._call.texts)]
        self._sent = [len(text) for text in self._call.texts]
        return [(at, text) for at, text in unsent if text]

    def _stamp(self) -> Stamp:
        """Make the identity of the reply: the number of its node, or that of its call before the node is known."""
        outcome = self._call.outcome
        known = outcome is not None and not isinstance(outcome, Exception)
        number = str(outcome[0].node) if known else f"call{self._call.number}"  # type: ignore[index]
        return Stamp(number=number, model=self._model, created=self._call.created)

    def _notices(self) -> dict[str, str]:
        """Headers that name the ignored and the relaxed fields of the request."""
        named = {"x-asyncrl-ignored": self._asked.ignored, "x-asyncrl-relaxed": self._asked.relaxed}
        return {header: ", ".join(fields) for header, fields in named.items() if fields}

    async def _fail(self, failure: Failure) -> web.StreamResponse:
        return await send(self._request, self._dialect.failure(failure), failure.status, timeout_s=self._timeout_s)

    async def _write(self, raw: bytes, content_type: str) -> web.StreamResponse:
        """Send a part of the answer; the first call sends the status and the headers before it."""
        async with _in_time(self._timeout_s):
            if self._response is None:
                headers = {"Content-Type": content_type, "Cache-Control": "no-cache", **self._notices()}
                self._response = web.StreamResponse(headers=headers)
                await self._response.prepare(self._request)
            await self._response.write(raw)
        return self._response

    async def _finish(self, raw: bytes) -> web.StreamResponse:
        # The content type matters to a stream alone: a body of JSON has sent its headers with the first blank.
        response = await self._write(raw, EVENT_STREAM)
        async with _in_time(self._timeout_s):
            await response.write_eof()
        return response

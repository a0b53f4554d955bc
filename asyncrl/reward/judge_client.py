"""The requests to a judge's server: its limits, its retries through the ``openai`` package, and its answers.

The package repeats requests that fail for the moment, and waits as ``Retry-After`` says. A request waits for its turn
under the limits, in the order of arrival. A repeat of the package counts under the limits, and does not wait. After a
server has refused a JSON schema, all later requests have none.

Invariants: in any 60 seconds no more requests or tokens begin than the limit. Repeats of the package, and errors of the
estimate of tokens, may exceed it. A single larger request begins alone. A request has the configured key and no other
credential; in particular, it has nothing of the ``OPENAI_*`` variables. An answer takes no more than MOST_BYTES. No
redirect is followed, so the key reaches no other host.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import openai

from asyncrl.reward.judge_answers import VoteFailed
from asyncrl.reward.judge_options import JudgeOptions

if TYPE_CHECKING:
    from asyncrl.reward.judge_pool import JudgeCounters

MINUTE_S = 60.0
CHARS_PER_TOKEN = 3.5
ANSWER_TOKENS = 500
"""Estimated number of tokens of an answer, for the limits, until the server has reported it."""
CONNECT_S = 30.0
MOST_BYTES = 4 << 20
"""Largest body of an answer (bytes). The body of a failed request is cut at this size."""
PASSING = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed later."""
WITHOUT_SCHEMA, SCHEMA_WORDS = (400, 404, 415, 422, 501), ("response_format", "json_schema", "schema", "grammar")
"""Statuses and words by which servers refuse response_format."""


class _JudgeMessage(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _JudgeMessage
    finish_reason: str | None = None


class _JudgeUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _JudgeCompletion(msgspec.Struct):
    choices: list[_JudgeChoice]
    usage: _JudgeUsage | None = None


_decoder = msgspec.json.Decoder(_JudgeCompletion)


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's answer, and the seconds that are left of the time that it was given."""

    text: str
    completion_tokens: int
    """Number of tokens as the server counts them; 0 if it does not."""
    cut: bool
    """Whether the answer was cut because it reached the most tokens that it may have."""
    left_s: float


@dataclass(slots=True)
class Spent:
    """Requests or tokens, ``units`` of them, that began at the time ``at``."""

    at: float
    units: float


class MinuteLimit:
    """At most ``limit`` units, requests or tokens, in any minute; None is no limit. Times are in seconds. Pure."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._spent: deque[Spent] = deque()
        """Units that began, the oldest first; ``wait_s`` forgets old ones. Empty without a limit."""

    def wait_s(self, units: float, now: float) -> float:
        """Return the seconds until ``units`` may begin; 0 if they may now.

        If ``units`` alone exceed the limit, they may begin once nothing began in the last minute.
        """
        if self._limit is None:
            return 0.0
        while self._spent and self._spent[0].at + MINUTE_S <= now:
            self._spent.popleft()
        over = sum(spent.units for spent in self._spent) + units - self._limit
        until = now
        for spent in self._spent:
            if over <= 0:
                break
            over -= spent.units
            until = spent.at + MINUTE_S
        return until - now

    def begin(self, units: float, now: float) -> Spent:
        """Record that ``units`` begin; returns the record, which the caller may correct if ``units`` was an
        estimate."""
        spent = Spent(now, units)
        if self._limit is not None:
            self._spent.append(spent)
        return spent


class JudgeClient:
    """Asks one judge. Made and used in one event loop.

    ``on_end`` receives the seconds of each HTTP request, answered or not; repeats of the package count as requests.
    """

    def __init__(self, options: JudgeOptions, counters: JudgeCounters, on_end: Callable[[float], None]) -> None:
        self._options, self._counters = options, counters
        self._takes_schema = "response_format" not in options.extra
        """Whether requests have a JSON schema: not if the user sets response_format, or after a server refused it."""
        self._places = asyncio.Semaphore(options.concurrency)
        """One place for each request that may be open at a time."""
        self._limits_lock = asyncio.Lock()
        """Held by the request that waits for the limits of a minute; later ones wait for the lock."""
        self._requests, self._tokens = MinuteLimit(options.requests_per_minute), MinuteLimit(options.tokens_per_minute)
        self.waiting = 0
        """Number of requests that wait for their turn under the limits."""
        # A key that was read from a file may end with a newline.
        key = os.environ.get(options.api_key_env, "").strip() if options.api_key_env else ""
        self._client = openai.AsyncOpenAI(
            base_url=options.url.rstrip("/").removesuffix("/chat/completions"),
            api_key=key or "none",
            max_retries=options.tries - 1,
            # ``ask`` limits the whole request.
            timeout=openai.Timeout(None, connect=CONNECT_S),
            http_client=JudgeTransport(key, on_request=self._note_request, on_end=on_end),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def ask(self, messages: Sequence[dict[str, str]], schema: dict[str, Any], timeout_s: float) -> JudgeReply:
        """Ask the model within ``timeout_s``, not counting the wait for a turn. Raises VoteFailed, TimeoutError.

        If the server refuses the JSON schema, this and all later requests are sent without one.
        """
        options, takes_schema, left_s = self._options, self._takes_schema, timeout_s
        body = dict(options.extra)
        if takes_schema:
            format = {"name": "judgement", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": format}
        tokens = int(sum(len(message["content"]) for message in messages) / CHARS_PER_TOKEN) + ANSWER_TOKENS
        try:
            async with self._turn(tokens) as spent:
                began = time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        response = await self._client.chat.completions.with_raw_response.create(
                            model=options.model, messages=list(messages), extra_body=body
                        )
                finally:
                    left_s -= time.monotonic() - began
        except AnswerRefused as error:
            raise VoteFailed("refused answer", f"{options.url} gave {error}", passing=False) from None
        except openai.APIStatusError as error:
            if takes_schema and _refuses_schema(error):
                self._takes_schema = False
                self._counters.retries += 1
                return await self.ask(messages, schema, left_s)
            raise self._status_failure(error) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            raise VoteFailed("unreachable", f"{options.url} cannot be reached: {reason}") from error
        return self._read(response.content, spent, left_s)

    def _read(self, body: bytes, spent: Spent, left_s: float) -> JudgeReply:
        """Parse a server's answer, count its tokens and cost, and correct the estimate (``spent``).

        Raises VoteFailed if it is no chat completion.
        """
        url, counters = self._options.url, self._counters
        try:
            completion = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise VoteFailed("no chat completion", f"{url} gave no chat completion: {error}") from None
        if not completion.choices:
            raise VoteFailed("no chat completion", f"{url} gave a chat completion without a choice")
        choice, usage = completion.choices[0], completion.usage or _JudgeUsage()
        counters.prompt_tokens += usage.prompt_tokens
        counters.completion_tokens += usage.completion_tokens
        if prices := self._options.price_per_million:
            counters.cost += (prices[0] * usage.prompt_tokens + prices[1] * usage.completion_tokens) / 1e6
        if usage.prompt_tokens:
            # The estimate is corrected for the requests of the same minute.
            spent.units = usage.prompt_tokens + usage.completion_tokens
        text = choice.message.content or choice.message.refusal or ""
        return JudgeReply(text, usage.completion_tokens, choice.finish_reason == "length", left_s)

    def _status_failure(self, error: Any) -> VoteFailed:
        """Make a VoteFailed of an answer with an error status."""
        status, body = error.status_code, " ".join(error.response.text[:400].split())
        reason = f"{self._options.url} answers with status {status}: {body}"
        if pause := error.response.headers.get("Retry-After"):
            reason += f" (Retry-After: {pause})"
        return VoteFailed(f"status {status}", reason, passing=status in PASSING or status >= 500)

    @asynccontextmanager
    async def _turn(self, tokens: int) -> AsyncIterator[Spent]:
        """Wait until a request of about ``tokens`` tokens may begin; it counts as open during the context."""
        self.waiting += 1
        is_waiting = True
        try:
            async with self._places:
                # Only the first in line waits for the limits, so that a small request does not overtake a large one.
                async with self._limits_lock:
                    # In a loop, because requests that the package repeats meanwhile make the wait longer.
                    while (wait_s := self._wait_s(tokens)) > 0:  # noqa: ASYNC110
                        await asyncio.sleep(wait_s)
                    spent = self._begin(tokens)
                self.waiting -= 1
                is_waiting = False
                yield spent
        finally:
            self.waiting -= is_waiting

    def _wait_s(self, tokens: int) -> float:
        now = time.monotonic()
        return max(self._requests.wait_s(1, now), self._tokens.wait_s(tokens, now))

    def _begin(self, tokens: float) -> Spent:
        now = time.monotonic()
        self._requests.begin(1, now)
        return self._tokens.begin(tokens, now)

    def _note_request(self, size: int, again: bool) -> None:
        """Count a request of ``size`` bytes that is sent. ``again``: whether the package repeats it.

        A repeat counts under the limits too, because it did not wait for its turn.
        """
        self._counters.requests += 1
        if again:
            self._counters.retries += 1
            self._begin(size / CHARS_PER_TOKEN + ANSWER_TOKENS)


def _refuses_schema(error: Any) -> bool:
    body = error.response.text[:400]
    return error.status_code in WITHOUT_SCHEMA and any(word in body for word in SCHEMA_WORDS)


class AnswerRefused(openai.OpenAIError):  # type: ignore[misc]
    """The answer is too long or compressed. The ``openai`` package neither wraps this error nor tries again."""


class JudgeTransport(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
    """The HTTP client below the ``openai`` package: sends requests with ``key``, or with none if it is empty.

    ``on_request`` receives the bytes of a request before it is sent, and whether it is sent again. ``on_end`` receives
    the seconds of each request, from its start to the end of its answer, to its failure or to its cancellation.
    """

    def __init__(self, key: str, *, on_request: Callable[[int, bool], None], on_end: Callable[[float], None]) -> None:
        super().__init__(follow_redirects=False)
        self._on_request, self._on_end = on_request, on_end
        # A compressed answer could be far longer than what is received.
        self._own_headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._own_headers["Authorization"] = f"Bearer {key}"

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send the request with our own headers alone; returns the answer with its whole body."""
        self._on_request(len(request.content), request.headers.get("x-stainless-retry-count", "0") != "0")
        # The openai package adds headers from OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS.
        sent = self.build_request(
            request.method,
            request.url,
            content=request.content,
            headers=self._own_headers,
            extensions=request.extensions,
        )
        began = time.monotonic()
        try:
            response = await super().send(sent, stream=True, **options)
            try:
                body = await _body_of(response)
            finally:
                await response.aclose()
        finally:
            self._on_end(time.monotonic() - began)
        # The openai package looks for its own headers in the request.
        return type(response)(response.status_code, headers=response.headers, content=body, request=request)


async def _body_of(response: Any) -> bytes:
    """Read the body of an answer; that of a failed request may be cut. Raises AnswerRefused."""
    if response.headers.pop("Content-Encoding", "identity") != "identity":
        if response.is_success:
            raise AnswerRefused("a compressed answer, although the request excludes compression")
        return b""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MOST_BYTES:
            if response.is_success:
                raise AnswerRefused(f"an answer of more than {MOST_BYTES} bytes")
            break
    return bytes(body[:MOST_BYTES])

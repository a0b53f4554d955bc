"""The requests to a judge's server: its limits, its retries through the ``openai`` package, and its answers.

The package repeats requests that fail for the moment, and waits as a short ``Retry-After`` says. A request waits for
its turn under the limits, in the order of arrival. After a server has refused a JSON schema, all later requests have
none.

Invariants: a limit's requests or tokens begin at once after a quiet minute, and evenly over a minute otherwise. Repeats
of the package, and what the estimate of tokens leaves out, do not wait, but later requests wait for them. A request has
the configured key and no other credential; in particular, it has nothing of the ``OPENAI_*`` variables. An answer takes
no more than MOST_BYTES. No redirect is followed, so the key reaches no other host.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
from aiolimiter import AsyncLimiter

from asyncrl.reward.judge_answers import JudgeUsage, VoteFailed, read_completion
from asyncrl.reward.judge_options import JudgeOptions

if TYPE_CHECKING:
    from asyncrl.reward.judge_pool import JudgeCounters

CHARS_PER_TOKEN = 3.5
ANSWER_TOKENS = 500
"""Estimated number of tokens of an answer, for the limits, until the server has reported it."""
CONNECT_S = 30.0
"""Longest time to connect to the server (s)."""
MOST_BYTES = 4 << 20
"""Largest body of an answer (bytes). The body of a failed request is cut at this size."""
PASSING = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed later."""
WITHOUT_SCHEMA, SCHEMA_WORDS = (400, 404, 415, 422, 501), ("response_format", "json_schema", "schema", "grammar")
"""Statuses and words by which servers refuse response_format."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's answer."""

    text: str
    completion_tokens: int
    """Number of tokens as the server counts them; 0 if it does not."""
    cut: bool
    """Whether the answer was cut because it reached the most tokens that it may have."""
    left_s: float
    """Seconds that are left of the ``timeout_s`` of ``ask``."""


class MinuteLimit:
    """A bucket of ``limit`` units, requests or tokens, that empties evenly within a minute. None is no limit."""

    def __init__(self, limit: float | None) -> None:
        self._bucket = AsyncLimiter(limit) if limit is not None else None
        self.due = 0.0
        """Units that have begun without waiting, for which the next ones wait; below 0 if too many have waited."""

    async def wait(self, units: float) -> None:
        """Wait until ``units`` may begin; more than the limit may begin with an empty bucket. One caller at a time."""
        if self._bucket is None:
            return
        if self._bucket.has_capacity(self._bucket.max_rate):
            # The bucket is empty. A ``due`` below 0 is a credit for waits that were too long; it ends here.
            self.due = max(self.due, 0.0)
        amount = min(max(self.due + units, 0.0), self._bucket.max_rate)
        await self._bucket.acquire(amount)
        self.due += units - amount


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
        self._line = asyncio.Lock()
        """Held by the request that waits for the limits and for a place; later ones wait for the lock."""
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
            http_client=JudgeTransport(key, self._note_request, on_end),
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
        tokens = sum(len(message["content"]) for message in messages) / CHARS_PER_TOKEN + ANSWER_TOKENS
        create = self._client.chat.completions.with_raw_response.create
        try:
            async with self._turn(tokens):
                began = time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        response = await create(model=options.model, messages=list(messages), extra_body=body)
                finally:
                    left_s -= time.monotonic() - began
        except AnswerRefused as error:
            raise VoteFailed("refused answer", f"{options.url} gave {error}", passing=False) from None
        except openai.APIStatusError as error:
            text = error.response.text[:400]
            if takes_schema and error.status_code in WITHOUT_SCHEMA and any(word in text for word in SCHEMA_WORDS):
                self._takes_schema = False
                self._counters.retries += 1
                return await self.ask(messages, schema, left_s)
            raise self._status_failure(error) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            raise VoteFailed("unreachable", f"{options.url} cannot be reached: {reason}") from error
        return self._read(response.content, tokens, left_s)

    def _read(self, body: bytes, tokens: float, left_s: float) -> JudgeReply:
        """Read an answer, count its tokens and cost, and correct the estimate of ``tokens``. Raises VoteFailed."""
        completion, counters = read_completion(body, self._options.url), self._counters
        choice, usage = completion.choices[0], completion.usage or JudgeUsage()
        counters.prompt_tokens += usage.prompt_tokens
        counters.completion_tokens += usage.completion_tokens
        if prices := self._options.price_per_million:
            counters.cost += (prices[0] * usage.prompt_tokens + prices[1] * usage.completion_tokens) / 1e6
        if usage.prompt_tokens:
            # Below 0 it is a credit: later requests wait for fewer tokens.
            self._tokens.due += usage.prompt_tokens + usage.completion_tokens - tokens
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
    async def _turn(self, tokens: float) -> AsyncIterator[None]:
        """Wait until a request of about ``tokens`` tokens may begin; it counts as open during the context."""
        self.waiting += 1
        try:
            # Only the first in line waits for the limits, so that a small request does not overtake a large one.
            async with self._line:
                await self._requests.wait(1)
                await self._tokens.wait(tokens)
                await self._places.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    def _note_request(self, request: Any) -> None:
        """Count a request of the package. A repeat has not waited under the limits, so later requests wait for it."""
        self._counters.requests += 1
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            self._counters.retries += 1
            self._requests.due += 1
            self._tokens.due += len(request.content) / CHARS_PER_TOKEN + ANSWER_TOKENS


class AnswerRefused(openai.OpenAIError):  # type: ignore[misc]
    """A successful answer that is compressed or longer than MOST_BYTES. The ``openai`` package does not repeat it."""


class JudgeTransport(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
    """The HTTP client below the ``openai`` package: sends requests with ``key``, or with none if it is empty.

    ``on_request`` receives each request of the package before it is sent, repeats included. ``on_end`` receives the
    seconds of each request, from its start to the end of its answer, to its failure or to its cancellation.
    """

    def __init__(self, key: str, on_request: Callable[[Any], None], on_end: Callable[[float], None]) -> None:
        # A compressed answer could be far longer than what is received.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        super().__init__(follow_redirects=False, headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}))
        self._on_request, self._on_end = on_request, on_end

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send the request with the headers of this client alone; returns the answer with its body (``_body_of``)."""
        self._on_request(request)
        # The openai package adds headers from OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS.
        content, extensions = request.content, request.extensions
        sent = self.build_request(request.method, request.url, content=content, extensions=extensions)
        began = time.monotonic()
        try:
            response = await super().send(sent, stream=True, **options)
            try:
                body = await _body_of(response)
            finally:
                await response.aclose()
        finally:
            self._on_end(time.monotonic() - began)
        # With the package's own request: the package reads the headers that it has set there.
        return type(response)(response.status_code, headers=response.headers, content=body, request=request)


async def _body_of(response: Any) -> bytes:
    """Read the body of an answer. Raises AnswerRefused.

    The body of an error is cut to MOST_BYTES; it is empty if the server compressed it.
    """
    body, is_plain = bytearray(), response.headers.pop("Content-Encoding", "identity") == "identity"
    async for part in response.aiter_raw():
        body += part
        if not is_plain or len(body) > MOST_BYTES:
            if response.is_success:
                raise AnswerRefused(f"an answer of more than {MOST_BYTES} bytes, or a compressed one")
            return bytes(body[:MOST_BYTES]) if is_plain else b""
    return bytes(body)

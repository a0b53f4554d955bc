"""One vote of a judge: a question that is asked until its answer can be used, or the vote fails.

The ``openai`` package sends the requests, repeats those that fail for the moment, and waits as ``Retry-After`` says. An
answer that cannot be used is sent back once, with the problems. Invariant: a vote ends within its time with the judge's
answer or with VoteFailed. Only the wait for a turn under the limits does not count as time. A server that takes no JSON
schema is asked without one from then on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.reward.judge_answers import BadAnswer
from asyncrl.reward.judge_cache import AnswerCache, key_of
from asyncrl.reward.judge_limits import JudgeLimits
from asyncrl.reward.judge_options import JudgeOptions
from asyncrl.reward.judge_questions import Question
from asyncrl.reward.judge_views import shorten

CHARS_PER_TOKEN = 3.5
ANSWER_TOKENS = 500
"""Estimate of the tokens of an answer before it has come."""
CONNECT_S = 30.0
PASSING = (408, 409, 425, 429)
"""Statuses below 500 that say nothing about the request."""
WITHOUT_SCHEMA, SCHEMA_WORDS = (400, 404, 415, 422, 501), ("response_format", "json_schema", "schema", "grammar")
"""Statuses and words by which servers refuse response_format."""
REPAIR = """Your answer cannot be used:
{problems}

Answer again, with the whole JSON object and nothing else."""
REPAIR_CHARS = 20_000
"""Characters of an answer that is sent back."""


class VoteFailed(Exception):
    """The judge gave no usable answer. ``kind`` is short; ``passing``: another attempt may succeed."""

    def __init__(self, kind: str, reason: str, *, passing: bool = True) -> None:
        self.kind, self.passing = kind, passing
        super().__init__(reason)


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's answer. Tokens are as its server counts them; 0 if it does not."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool
    """Whether the answer was cut at its longest length."""


@dataclass(slots=True)
class JudgeCounters:
    """Counts since the start."""

    requests: int = 0
    """Requests sent to the judge's server."""
    retries: int = 0
    """Requests sent again."""
    repairs: int = 0
    """Unusable answers, sent back once."""
    failed_votes: int = 0
    unjudged: int = 0
    """Groups, or trajectories under a rubric, left without a reward; each may be judged when it is tried again."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    cached: int = 0
    """Votes that an answer in the run's folder gave."""
    uncached: int = 0
    """Answers that could not be kept in the run's folder."""


class Asker:
    """Asks one judge. Made and used in one event loop. Raises ImportError without the package ``openai``.

    ``on_request`` receives the seconds of each request, answered or not.
    """

    def __init__(
        self,
        options: JudgeOptions,
        *,
        timeout_s: float,
        counters: JudgeCounters,
        cache: AnswerCache | None,
        on_request: Callable[[float], None],
    ) -> None:
        import openai

        from asyncrl.reward.judge_client import AnswerRefused, JudgeClient

        self._openai, self._answer_refused = openai, AnswerRefused
        self._options, self._timeout_s, self._counters = options, timeout_s, counters
        self._cache = cache
        self._takes_schema = "response_format" not in options.extra
        self._decoder = msgspec.json.Decoder(_Completion)
        self.limits = JudgeLimits(
            options.concurrency,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
        # A key that was read from a file may end with a newline.
        key = os.environ.get(options.api_key_env, "").strip() if options.api_key_env else ""
        self._client = openai.AsyncOpenAI(
            base_url=options.url.rstrip("/").removesuffix("/chat/completions"),
            api_key=key or "none",
            max_retries=options.tries - 1,
            timeout=openai.Timeout(None, connect=CONNECT_S),
            http_client=JudgeClient(key, on_request=self._note_request, on_end=on_request),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def vote(self, question: Question) -> Any:
        """The judge's answer, as ``question.read`` gives it. Raises VoteFailed."""
        options = self._options
        # The first vote has the key of a question that is asked once.
        number = (question.vote,) if question.vote else ()
        key = key_of(options.url, options.model, options.extra, question.messages, question.schema, *number)
        kept = await asyncio.to_thread(self._cache.find, key) if self._cache is not None else None
        if kept is not None:
            try:
                said = question.read(kept)
            except BadAnswer:
                # The answer was kept by a version that took what this one does not.
                pass
            else:
                self._counters.cached += 1
                return said
        try:
            said, text = await self._usable(question)
        except VoteFailed:
            self._counters.failed_votes += 1
            raise
        except BadAnswer as error:
            self._counters.failed_votes += 1
            raise VoteFailed("unusable answer", f"its answer cannot be used, nor the repaired one: {error}") from error
        except TimeoutError:
            self._counters.failed_votes += 1
            told = f"{options.url} gave no answer that can be used within {self._timeout_s:g} s (reward.timeout_s)"
            raise VoteFailed("timed out", told) from None
        if self._cache is not None and not await asyncio.to_thread(self._cache.keep, key, text):
            self._counters.uncached += 1
        return said

    async def _usable(self, question: Question) -> tuple[Any, str]:
        """The answer as read, and its text. Raises VoteFailed, BadAnswer for the repaired one, TimeoutError."""
        time_left = _TimeLeft(self._timeout_s)
        reply = await self._ask(question.messages, question.schema, time_left)
        try:
            return question.read(reply.text), reply.text
        except BadAnswer as error:
            if reply.cut and not reply.text:
                # Reasoning has taken all tokens that the judge may write, and would again.
                raise _cut(reply, error) from error
            problems = "\n".join(f"* {problem}" for problem in error.problems)
        self._counters.repairs += 1
        said = {"role": "assistant", "content": shorten(reply.text, REPAIR_CHARS) or "(nothing)"}
        asked = {"role": "user", "content": REPAIR.format(problems=problems)}
        reply = await self._ask([*question.messages, said, asked], question.schema, time_left)
        try:
            return question.read(reply.text), reply.text
        except BadAnswer as error:
            if reply.cut:
                raise _cut(reply, error) from error
            raise

    async def _ask(
        self, messages: Sequence[dict[str, str]], schema: dict[str, Any], time_left: _TimeLeft
    ) -> JudgeReply:
        """The model's answer. Raises VoteFailed, TimeoutError."""
        options, counters, takes_schema = self._options, self._counters, self._takes_schema
        body = dict(options.extra)
        if takes_schema:
            format = {"name": "judgement", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": format}
        tokens = int(sum(len(message["content"]) for message in messages) / CHARS_PER_TOKEN) + ANSWER_TOKENS
        try:
            async with self.limits.turn(tokens) as spent, time_left.counted():
                response = await self._client.chat.completions.with_raw_response.create(
                    model=options.model, messages=list(messages), extra_body=body
                )
        except self._answer_refused as error:
            raise VoteFailed("refused answer", f"{options.url} gave {error}", passing=False) from None
        except self._openai.APIStatusError as error:
            if takes_schema and self._refuses_schema(error):
                self._takes_schema = False
                counters.retries += 1
                return await self._ask(messages, schema, time_left)
            raise self._failed(error) from error
        except self._openai.APIConnectionError as error:
            cause = error.__cause__ or error
            told = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            raise VoteFailed("unreachable", f"{options.url} cannot be reached: {told}") from error
        reply = self._read(response.content)
        counters.prompt_tokens += reply.prompt_tokens
        counters.completion_tokens += reply.completion_tokens
        if prices := options.price_per_million:
            counters.cost += (prices[0] * reply.prompt_tokens + prices[1] * reply.completion_tokens) / 1e6
        if reply.prompt_tokens:
            # The estimate is corrected for the requests of the same minute.
            spent.units = reply.prompt_tokens + reply.completion_tokens
        return reply

    def _read(self, body: bytes) -> JudgeReply:
        try:
            completion = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            told = f"{self._options.url} gave no chat completion: {error}"
            raise VoteFailed("no chat completion", told) from None
        if not completion.choices:
            raise VoteFailed("no chat completion", f"{self._options.url} gave a chat completion without a choice")
        choice, usage = completion.choices[0], completion.usage or _Usage()
        text, cut = choice.message.content or choice.message.refusal or "", choice.finish_reason == "length"
        return JudgeReply(text, usage.prompt_tokens, usage.completion_tokens, cut)

    def _refuses_schema(self, error: Any) -> bool:
        said = error.response.text[:400]
        return error.status_code in WITHOUT_SCHEMA and any(word in said for word in SCHEMA_WORDS)

    def _failed(self, error: Any) -> VoteFailed:
        status, said = error.status_code, " ".join(error.response.text[:400].split())
        told = f"{self._options.url} answers with status {status}: {said}"
        if pause := error.response.headers.get("Retry-After"):
            told += f" (Retry-After: {pause})"
        return VoteFailed(f"status {status}", told, passing=status in PASSING or status >= 500)

    def _note_request(self, size: int, again: bool) -> None:
        self._counters.requests += 1
        if again:
            self._counters.retries += 1
            self.limits.retried(size / CHARS_PER_TOKEN + ANSWER_TOKENS)


def _cut(reply: JudgeReply, error: BadAnswer) -> VoteFailed:
    told = f"its answer was cut after {reply.completion_tokens} tokens and cannot be used: {error}"
    return VoteFailed("cut answer", f"{told}; give it more (reward.options.extra, as max_completion_tokens)")


class _TimeLeft:
    """Seconds that may still be spent."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count the time in the context. Raises TimeoutError when none is left."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                yield
        finally:
            self._left -= time.monotonic() - began

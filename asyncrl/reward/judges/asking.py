"""One vote of a judge: a question asked until its answer can be used, or the vote fails.

A request that the server refuses for the moment is sent again, after the pause that the server asks for, which holds
back all others too, and not before a growing one of its own is over. An answer that cannot be used is sent back once,
with what is wrong. Invariant: a vote ends within its time, which only waiting under the shared limits does not count,
in what the judge said or in VoteFailed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.reward.judges.answers import BadAnswer
from asyncrl.reward.judges.cache import AnswerCache, key_of
from asyncrl.reward.judges.client import AskFailed, JudgeClient, JudgeReply, SchemaRefused
from asyncrl.reward.judges.limits import JudgeLimits
from asyncrl.reward.judges.options import JudgeOptions
from asyncrl.reward.judges.questions import Question
from asyncrl.reward.judges.views import shorten
from asyncrl.runtime.lifecycle.backoff import backoff

CHARS_PER_TOKEN = 3.5
ANSWER_TOKENS = 500
"""Tokens that an answer is taken to have before it is there."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
"""First and longest pause (s) between two tries where the server asks for none that is longer."""
LONGEST_ASKED_PAUSE_S = 120.0
"""Longest pause (s) that a server may ask for; one that asks for more is not waited for."""
REPAIR = """Your answer cannot be used:
{problems}

Answer again, with the whole JSON object and nothing else."""
REPAIR_CHARS = 20_000
"""Characters of an answer that is sent back."""


class VoteFailed(Exception):
    """The judge said nothing that can be used. ``kind`` is short; ``passing``: it may, when it is asked again."""

    def __init__(self, kind: str, reason: str, *, passing: bool = True) -> None:
        self.kind, self.passing = kind, passing
        super().__init__(reason)


@dataclass(slots=True)
class JudgeCounters:
    """Counts since the start."""

    requests: int = 0
    """Requests sent to the judge's server."""
    retries: int = 0
    """Requests sent again."""
    repairs: int = 0
    """Answers that could not be used, sent back once."""
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
    """Asks one judge."""

    def __init__(
        self,
        options: JudgeOptions,
        *,
        timeout_s: float,
        counters: JudgeCounters,
        cache: AnswerCache | None,
        on_request: Callable[[float], None],
    ) -> None:
        self._options, self._timeout_s, self._counters = options, timeout_s, counters
        self._cache, self._on_request = cache, on_request
        self._client = JudgeClient(options)
        self.limits = JudgeLimits(
            options.concurrency,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )

    async def close(self) -> None:
        """Close its connections."""
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
        except AskFailed as error:
            self._counters.failed_votes += 1
            raise VoteFailed(error.kind, error.reason, passing=error.passing) from error
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
        """The answer as it is read, and its text. Raises AskFailed, BadAnswer of the repaired one, TimeoutError."""
        time_left = _TimeLeft(self._timeout_s)
        reply = await self._answer(question.messages, question.schema, time_left)
        text = reply.text
        try:
            return question.read(text), text
        except BadAnswer as error:
            if reply.cut and not text:
                # Reasoning has taken all that it may write, and would again.
                raise _cut(reply, error) from error
            problems = "\n".join(f"* {problem}" for problem in error.problems)
        self._counters.repairs += 1
        said = {"role": "assistant", "content": shorten(text, REPAIR_CHARS) or "(nothing)"}
        asked = {"role": "user", "content": REPAIR.format(problems=problems)}
        reply = await self._answer([*question.messages, said, asked], question.schema, time_left)
        try:
            return question.read(reply.text), reply.text
        except BadAnswer as error:
            if reply.cut:
                raise _cut(reply, error) from error
            raise

    async def _answer(self, messages: list[dict[str, str]], schema: dict[str, Any], time_left: _TimeLeft) -> JudgeReply:
        tokens = int(sum(len(message["content"]) for message in messages) / CHARS_PER_TOKEN) + ANSWER_TOKENS
        for number in range(1, self._options.tries + 1):
            try:
                with suppress(SchemaRefused):
                    return await self._request(messages, schema, tokens, time_left)
                # The same try: it goes without the schema now, and cannot be refused so again.
                self._counters.retries += 1
                return await self._request(messages, schema, tokens, time_left)
            except AskFailed as error:
                if not error.passing or number == self._options.tries:
                    raise
                if error.pause_s is not None and error.pause_s > LONGEST_ASKED_PAUSE_S:
                    told = f"{error.reason} (it asks for a pause of {error.pause_s:.0f} s)"
                    raise AskFailed(error.kind, told, passing=True) from error
                self._counters.retries += 1
                # Pauses differ in length, so that requests that failed together do not all come back together.
                own_s = backoff(FIRST_PAUSE_S, number - 1, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
                if error.pause_s is not None:
                    self.limits.pause(error.pause_s)
                    if error.pause_s >= own_s:
                        continue
            # Also where the server asks for less, as for none at all, or the tries would be over at once.
            async with time_left.counted():
                await asyncio.sleep(own_s)
        raise AssertionError("unreachable")

    async def _request(
        self, messages: list[dict[str, str]], schema: dict[str, Any], tokens: int, time_left: _TimeLeft
    ) -> JudgeReply:
        counters, prices = self._counters, self._options.price_per_million
        async with self.limits.turn(tokens) as spent:
            counters.requests += 1
            began = time.monotonic()
            try:
                async with time_left.counted():
                    answer = await self._client.ask(messages, schema)
            finally:
                self._on_request(time.monotonic() - began)
            counters.prompt_tokens += answer.prompt_tokens
            counters.completion_tokens += answer.completion_tokens
            if prices:
                counters.cost += (prices[0] * answer.prompt_tokens + prices[1] * answer.completion_tokens) / 1e6
            if answer.prompt_tokens:
                # The estimate with which it began is put right, for those that come in the same minute.
                spent.units = answer.prompt_tokens + answer.completion_tokens
        return answer


def _cut(reply: JudgeReply, error: BadAnswer) -> AskFailed:
    told = f"its answer was cut after {reply.completion_tokens} tokens and cannot be used: {error}"
    fix = "give it more (reward.options.extra, as max_completion_tokens)"
    return AskFailed("cut answer", f"{told}; {fix}", passing=True)


class _TimeLeft:
    """Seconds that may still be spent."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Raises TimeoutError when they are over."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                yield
        finally:
            self._left -= time.monotonic() - began

"""The pool of a judge: answers the same calls as RewardPool, by asking a language model.

The calls of a judge wait for a server and run no users' code. So they share one process, one set of limits and one
cache. Each call asks ``reward.options.votes`` questions, its votes. A function that is added to the judge (``also``)
runs in a RewardPool. An answer that cannot be used is sent back once, with the problems.

Invariant: each call of ``score`` ends with the judge's rewards, by more than half of its votes, with RewardFailed or
with the pool's error. A call without a judgement never gets the reward 0. A vote ends with an answer or with
VoteFailed, within reward.timeout_s after its wait under the limits. The pool fails as a whole only if its owner gives
it up, or if the pool of the added function fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config.training import RewardConfig
from asyncrl.core.errors import AsyncRLError, ConfigError, RewardFailed, RewardPoolEnded
from asyncrl.messages.monitor import Resource
from asyncrl.messages.reward import Outcome, Score, Scores
from asyncrl.reward.faults import RewardFault
from asyncrl.reward.functions import shaped
from asyncrl.reward.judge_answers import AnswerCache, BadAnswer, VoteFailed, key_of
from asyncrl.reward.judge_options import RelativeOptions, RubricOptions, read_options
from asyncrl.reward.judge_questions import JUDGE_COMPONENT, SPREAD_COMPONENT, Judge, Question, RelativeJudge, Rubric
from asyncrl.reward.judge_views import shorten
from asyncrl.reward.reward_pool import UNOBSERVED, RewardCounts, RewardObserver, RewardPool
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.user_code import NotCallable

if TYPE_CHECKING:
    from asyncrl.reward.judge_client import JudgeClient, JudgeReply

CACHE_FOLDER = "judge_cache"
# The message that sends an unusable answer back.
REPAIR = """Your answer cannot be used:
{problems}

Answer again, with the whole JSON object and nothing else."""
REPAIR_CHARS = 20_000
"""Most characters of an unusable answer that are sent back to the judge."""


@dataclass(slots=True)
class JudgeCounters:
    """Counts since the start, by the names of metrics.py."""

    requests: int = 0
    retries: int = 0
    repairs: int = 0
    failed_votes: int = 0
    unjudged: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    cached: int = 0
    uncached: int = 0


def make_judge(config: RewardConfig) -> Judge:
    """Make the judge that the configuration names, and check its options. Raises NotCallable.

    Problems of the options (``read_options``) are raised first, then all other problems together.
    """
    judge: Judge
    if config.function == "rubric":
        judge = Rubric(read_options(RubricOptions, config.options))
    else:
        judge = RelativeJudge(read_options(RelativeOptions, config.options))
    problems: list[str] = []
    if config.per != judge.per:
        what = "single trajectories" if judge.per == "trajectory" else "groups"
        problems.append(f'reward.per: {config.function} scores {what}; set it to "{judge.per}"')
    if config.on_timeout != "fail":
        problems.append('reward.on_timeout: a late judge says nothing about a response; set it to "fail"')
    taken = (JUDGE_COMPONENT, SPREAD_COMPONENT, _component(judge.options.also))
    names = [criterion.name for criterion in getattr(judge.options, "rubric", [])]
    problems += [f"reward.options.rubric: the name {name} is taken" for name in names if name in taken]
    if problems:
        raise NotCallable(problems)
    return judge


def for_trial(config: RewardConfig) -> RewardConfig:
    """Return the configuration for a few calls before the run: with two tries, so that they fail soon."""
    return config.model_copy(update={"options": {**config.options, "tries": 2}})


class _AddedFunction(RewardObserver):
    """Passes on what the added function prints, and nothing else: the judge's calls report its outcomes."""

    def __init__(self, observer: RewardObserver) -> None:
        self._observer = observer

    def printed(self, uid: str, text: str, dropped: int) -> None:
        self._observer.printed(uid, text, dropped)


class JudgePool:
    """Judges by ``config.function``, which is one of JUDGES.

    ``folder`` is the run folder, in which answers are kept; None keeps no answer. ``confined`` is for the workers of
    the added function. Everything else is as in RewardPool.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_tokens: int,
        confined: Confinement = UNISOLATED,
        start_timeout_s: float = 120.0,
        folder: Path | None = None,
        observer: RewardObserver = UNOBSERVED,
    ) -> None:
        self._config, self._max_tokens, self._start_timeout_s = config, max_tokens, start_timeout_s
        self._confined, self._observer = confined, observer
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the pool is closed, or with the error for which its owner gave it up."""
        self._running: dict[asyncio.Task[Scores], tuple[float, str]] = {}
        """Open calls of ``score``: the monotonic time of the begin (s) and the uid of each."""
        self._judge: Judge
        self._client: JudgeClient | None = None
        """Client of the judge's server; None before ``start``."""
        self._cache = AnswerCache(folder / CACHE_FOLDER) if folder is not None else None
        self._also: RewardPool | None = None
        """Pool of the added function; None without one."""
        self._counters = RewardCounts()
        """Counts of calls of ``score``; ``counters`` adds those of the added function's workers."""
        self.judged = JudgeCounters()

    async def start(self) -> None:
        """Check the options, make the client, start the workers of the added function. Raises as RewardPool.start."""
        config = self._config
        try:
            from asyncrl.reward.judge_client import JudgeClient

            self._judge = make_judge(config)
            options = self._judge.options
            self._client = JudgeClient(options, self.judged, self._observer.judge_asked)
        except NotCallable as error:
            raise ConfigError(error.problems) from error
        except ImportError as error:
            missing = f"{config.function} needs the package {error.name} ({error}); pip install 'asyncrl[judges]'"
            raise ConfigError([f"reward.function: {missing}"]) from error
        if options.also:
            added = {"function": options.also, "options": options.also_options, "per": "trajectory"}
            # "score", because ``_score`` adds the overlong penalty once, to the sum of both rewards.
            self._also = RewardPool(
                config.model_copy(update={**added, "truncated": "score"}),
                max_tokens=self._max_tokens,
                confined=self._confined,
                start_timeout_s=self._start_timeout_s,
                observer=_AddedFunction(self._observer),
            )
            try:
                await self._also.start()
            except ConfigError as error:
                raise ConfigError([_name_also_keys(problem) for problem in error.problems]) from error

    def score(self, request: Score) -> asyncio.Future[Scores]:
        """Start to judge a completion or a group. The future raises RewardFailed; cancelling it ends its requests."""
        if self._end.done():
            raise self._ended_error()
        task = asyncio.get_running_loop().create_task(self._score(request))
        self._running[task] = (time.monotonic(), request.uid)
        task.add_done_callback(lambda task: self._running.pop(task, None))
        return task

    async def watch(self) -> None:
        """Return when the pool is closed. Raises the error of ``give_up``, or of the added function's pool."""
        if self._also is None:
            await asyncio.shield(self._end)
            return
        added = asyncio.ensure_future(self._also.watch())
        try:
            await asyncio.wait({self._end, added}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            added.cancel()
        await (self._end if self._end.done() else added)

    def give_up(self, error: AsyncRLError) -> None:
        """Take no more calls, because of ``error``."""
        if not self._end.done():
            self._end.set_exception(error)

    async def close(self) -> None:
        """End all calls, connections and processes."""
        if not self._end.done():
            self._end.set_result(None)
        # Read the error, so that asyncio does not complain if no task has called ``watch``.
        self._end.exception()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._client is not None:
            await self._client.close()
        if self._also is not None:
            await self._also.close()

    @property
    def counters(self) -> RewardCounts:
        """Counts of the judge's calls, with those of the added function's processes."""
        also = self._also.counters if self._also is not None else RewardCounts()
        own = self._counters
        return replace(also, scored=own.scored, failed=own.failed, timed_out=own.timed_out + also.timed_out)

    @property
    def queued(self) -> int:
        """Requests that wait under the limits."""
        return self._client.waiting if self._client is not None else 0

    @property
    def running(self) -> int:
        """Calls of ``score`` without an answer."""
        return len(self._running)

    def resources(self) -> list[Resource]:
        """Resource records of the added function's workers."""
        return self._also.resources() if self._also is not None else []

    def longest_task(self) -> tuple[str, float] | None:
        """Return uid and seconds of the call that has run longest; None if nothing runs. Any thread may call it."""
        # A copy, because the event loop may change it meanwhile.
        running = list(self._running.copy().values())
        if not running:
            return None
        began, uid = min(running)
        return uid, time.monotonic() - began

    async def _score(self, request: Score) -> Scores:
        """Ask the judge and call the added function at the same time, and add up their rewards.

        If either fails, counts and reports the failure and raises RewardFailed. After the pool's end, raises its error.
        """
        began = time.monotonic()
        fault: RewardFault | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                added = tasks.create_task(self._call_added(request))
                judged = tasks.create_task(self._ask_votes(request))
        except BaseExceptionGroup as group:
            error = _first_error(group)
            if isinstance(error, _Unjudged):
                self.judged.unjudged += 1
                self._counters.timed_out += error.timed_out
                fault = RewardFault(error.kind, str(error))
            elif isinstance(error, RewardFailed) and not isinstance(error, RewardPoolEnded):
                fault = RewardFault(f"{self._judge.options.also} failed", error.reason)
            else:
                raise error from None
            self._counters.failed += 1
            if self._end.done():
                raise self._ended_error() from error
            self._observer.call_ended(request.uid, fault, None)
            raise RewardFailed(
                self._config.function, fault.text, retryable=getattr(error, "retryable", True)
            ) from error
        outcomes, judgements = judged.result()
        both = list(zip(outcomes, added.result(), strict=True))
        self._counters.scored += 1
        self._observer.call_ended(request.uid, None, time.monotonic() - began)
        scores = Scores(
            rewards=[reward + added_reward for (reward, _), (added_reward, _) in both],
            components=[{**components, **added_components} for (_, components), (_, added_components) in both],
            judgements=judgements,
            run_s=time.monotonic() - began,
        )
        return shaped(scores, request, self._config.penalty, self._max_tokens)

    async def _ask_votes(self, request: Score) -> tuple[list[Outcome], list[str]]:
        """Ask all votes at the same time, and compute the outcomes and the judge's words from the valid ones.

        Raises _Unjudged unless more than half of them are valid, and for a row that cannot be judged.
        """
        try:
            questions = await asyncio.to_thread(self._judge.questions, request)
        except ValueError as error:
            raise _Unjudged("row", f"unjudged: {error}", retryable=False) from error
        async with asyncio.TaskGroup() as tasks:
            votes = [tasks.create_task(self._vote(question)) for question in questions]
        results = [vote.result() for vote in votes]
        answers = [answer for answer, failure in results if failure is None]
        failures = [failure for _, failure in results if failure is not None]
        if 2 * len(answers) > len(questions):
            return self._judge.results(request, answers)
        reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures))
        share = f"{len(failures)} of {len(questions)} votes failed: " if len(questions) > 1 else ""
        raise _Unjudged(
            failures[0].kind,
            f"unjudged: {share}{reasons[:2000]}",
            retryable=any(failure.passing for failure in failures),
            timed_out=any(failure.kind == "timed out" for failure in failures),
        )

    async def _vote(self, question: Question) -> tuple[Any, VoteFailed | None]:
        """Ask one vote. Returns (answer as ``question.read`` gives it, None), or (None, failure)."""
        try:
            return await self._answer(question), None
        except VoteFailed as error:
            failed = error
        except BadAnswer as error:
            failed = VoteFailed("unusable answer", f"its answer cannot be used, nor the repaired one: {error}")
        except TimeoutError:
            reason = f"{self._judge.options.url} gave no answer that can be used within {self._config.timeout_s:g} s"
            failed = VoteFailed("timed out", f"{reason} (reward.timeout_s)")
        self.judged.failed_votes += 1
        return None, failed

    async def _answer(self, question: Question) -> Any:
        """Find the answer to a question in the run folder, or else ask the judge and keep its answer there.

        Raises VoteFailed, BadAnswer, TimeoutError.
        """
        options, cache = self._judge.options, self._cache
        # Votes may have the same words, so the number of each vote after the first is in its key.
        number = (question.vote,) if question.vote else ()
        key = key_of(options.url, options.model, options.extra, question.messages, question.schema, *number)
        kept = await asyncio.to_thread(cache.find, key) if cache is not None else None
        if kept is not None:
            # Another version of the program may have kept an answer that this version refuses: then ask the judge.
            with contextlib.suppress(BadAnswer):
                answer = question.read(kept)
                self.judged.cached += 1
                return answer
        answer, text = await self._ask(question)
        if cache is not None and not await asyncio.to_thread(cache.keep, key, text):
            self.judged.uncached += 1
        return answer

    async def _ask(self, question: Question) -> tuple[Any, str]:
        """Ask the judge; if the answer is unusable, send its problems back once. Returns (answer as read, its text).

        Raises VoteFailed, TimeoutError, and BadAnswer if the second answer is unusable too.
        """
        assert self._client is not None
        reply = await self._client.ask(question.messages, question.schema, self._config.timeout_s)
        try:
            return question.read(reply.text), reply.text
        except BadAnswer as error:
            if reply.cut and not reply.text:
                # Reasoning has used all tokens that the judge may write. A second question would end the same way.
                raise _cut_failure(reply, error) from error
            problems = "\n".join(f"* {problem}" for problem in error.problems)
        self.judged.repairs += 1
        answer = {"role": "assistant", "content": shorten(reply.text, REPAIR_CHARS) or "(nothing)"}
        request = {"role": "user", "content": REPAIR.format(problems=problems)}
        reply = await self._client.ask([*question.messages, answer, request], question.schema, reply.left_s)
        try:
            return question.read(reply.text), reply.text
        except BadAnswer as error:
            if reply.cut:
                raise _cut_failure(reply, error) from error
            raise

    async def _call_added(self, request: Score) -> list[Outcome]:
        """Call the added function for each completion. Returns weighted outcomes, or zeros without such a function.

        Raises RewardFailed.
        """
        if self._also is None:
            return [(0.0, {})] * len(request.completions)
        options = self._judge.options
        calls = [
            self._also.score(msgspec.structs.replace(request, completions=[completion]))
            for completion in request.completions
        ]
        try:
            scores = await asyncio.gather(*calls)
        finally:
            # If one call has failed, cancel the others; a finished call ignores this.
            for call in calls:
                call.cancel()
        name = _component(options.also)
        return [
            (
                options.also_weight * one.rewards[0],
                {name: one.rewards[0], **{f"{name}.{key}": value for key, value in one.components[0].items()}},
            )
            for one in scores
        ]

    def _ended_error(self) -> AsyncRLError:
        error = self._end.exception()
        if isinstance(error, AsyncRLError):
            return error
        return RewardPoolEnded(self._config.function, "the pool was closed")


class _Unjudged(Exception):
    """A call has no judgement, because too few votes are valid or its row cannot be judged."""

    def __init__(self, kind: str, text: str, *, retryable: bool, timed_out: bool = False) -> None:
        self.kind, self.retryable, self.timed_out = f"unjudged ({kind})", retryable, timed_out
        super().__init__(text)


def _cut_failure(reply: JudgeReply, error: BadAnswer) -> VoteFailed:
    reason = f"its answer was cut after {reply.completion_tokens} tokens and cannot be used: {error}"
    return VoteFailed("cut answer", f"{reason}; give it more (reward.options.extra, as max_completion_tokens)")


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group that may hold other groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _name_also_keys(problem: str) -> str:
    """Rewrite a problem of the added function so that it names the keys by which the user sets that function."""
    for key, own in (("reward.function", "reward.options.also"), ("reward.options", "reward.options.also_options")):
        if problem.startswith(key):
            return own + problem.removeprefix(key)
    return problem


def _component(also: str) -> str:
    """Name of the component of an added function."""
    return also.rpartition(":")[2]

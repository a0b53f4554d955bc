"""The reward function, found as the pool finds it and called on sample rows, in a worker of a pool of its own.

So a function that exits, hangs, eats memory or prints without end costs that worker and nothing else. A call on one
sample may fail by that sample, or by a completion that no model would write: a function that fails on each sample of
a set is an error, one that fails on some a warning. A call that runs over its time is a warning, too, unless all do
for which there was time and reward.on_timeout gives such a response no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config import Config
from asyncrl.config.training import RewardConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, RewardFailed
from asyncrl.messages.reward import Completion, Score
from asyncrl.preflight.findings import Finding, fail, listed, ok, warn
from asyncrl.preflight.inputs import Sample
from asyncrl.reward.judges import JUDGES
from asyncrl.reward.judges.pool import JudgePool, for_trial
from asyncrl.reward.pool import RewardPool
from asyncrl.runtime.workers.confinement import Confinement

IMPORT_S = 45.0
"""Longest time for importing the function's module; the pool has more, so that this is no error."""
CALLS_S = 12.0
"""Longest time for all calls together; reward.timeout_s, by default less, bounds each of them too."""
PLAIN = "I am not sure. The answer is 42."
"""Completion that a model might give to anything."""
KEY = "reward.function"


@dataclass
class Trial:
    """The outcome of the calls on the samples of one set of prompts."""

    rewards: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Reasons of failures, with the place of the row."""


class RewardTrial:
    """A worker with the function; use it as a context. Starting it and reading the samples may go on together."""

    def __init__(self, config: Config, *, import_s: float = IMPORT_S, calls_s: float = CALLS_S) -> None:
        self._reward, self._n = config.reward, config.rollout.samples_per_prompt
        self._import_s, self._calls_s = import_s, calls_s
        one = self._reward.model_copy(update={"workers": 1})
        given: dict[str, Any] = {
            "max_tokens": config.rollout.max_tokens,
            "confined": Confinement(config.security.user_environment),
            "start_timeout_s": import_s,
        }
        self._pool: RewardPool | JudgePool
        if one.function in JUDGES:
            self._pool = JudgePool(for_trial(one), **given)
        else:
            self._pool = RewardPool(one, **given)

    async def __aenter__(self) -> RewardTrial:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def start(self) -> Finding | None:
        """Start the worker; a finding where the function cannot be called, None if it can."""
        fix = "correct reward.function and reward.options; the module has to be installed or lie where you launch"
        try:
            await self._pool.start()
        except ConfigError as error:
            return fail("reward", listed(error.problems), fix)
        except RewardFailed as error:
            return fail("reward", f"importing {self._reward.function}: it {error.reason}", fix, key=KEY)
        except DeadlineExceeded:
            told = f"importing {self._reward.function} takes more than {self._import_s:g} s, so it was not called"
            fix = "see what its module does when it is imported; each worker of the pool does it, too"
            return warn("reward", told, fix, key=KEY)
        return None

    async def call(self, samples: Sequence[Sample]) -> Finding:
        """Call the function on each sample, until the time is over."""
        trials: dict[str, Trial] = {}
        calls = list(_calls(self._reward, samples, self._n))
        try:
            async with asyncio.timeout(self._calls_s):
                for sample, completions in calls:
                    trial = trials.setdefault(sample.key, Trial())
                    asked = Score(uid="1/0", prompt=sample.prompt, row=sample.row, completions=completions)
                    try:
                        trial.rewards += (await self._pool.score(asked)).rewards
                    except RewardFailed as error:
                        trial.errors.append(f"{error.reason}, on {sample.place}")
        except TimeoutError:
            if not any(trial.rewards or trial.errors for trial in trials.values()):
                told = f"{self._reward.function} was called, and had not answered after {self._calls_s:g} s"
                fix = f"see that it ends within reward.timeout_s = {self._reward.timeout_s:g}"
                return warn("reward", told, fix, key=KEY)
        return judge(self._reward, trials, calls=len(calls), timed_out=self._pool.counters.timed_out)


def _calls(reward: RewardConfig, samples: Sequence[Sample], n: int) -> Iterator[tuple[Sample, list[Completion]]]:
    """Each sample with completions that a model may have given: the row's answer, where it has one, and another."""
    column = reward.options.get("answer_key", "answer")
    for sample in samples:
        answer = sample.row.get(column)
        texts = [str(answer), PLAIN] if isinstance(answer, str | int | float) else [PLAIN]
        said = [Completion(text=text, finish_reason="stop", tokens=max(1, len(text.split()))) for text in texts]
        if reward.per == "group":
            yield sample, (said * n)[:n]
        else:
            yield from ((sample, [one]) for one in said)


def judge(reward: RewardConfig, trials: dict[str, Trial], *, calls: int, timed_out: int) -> Finding:
    """Judge the trials, by set of samples. Pure. ``calls`` were meant, and ``timed_out`` of them timed out."""
    function = reward.function
    errors = [error for trial in trials.values() for error in trial.errors]
    rewards = [reward for trial in trials.values() for reward in trial.rewards]
    broken = [trial for trial in trials.values() if trial.errors and not trial.rewards]
    faster = "make it faster, raise reward.timeout_s, or give such a response a reward by reward.on_timeout = NUMBER"
    if timed_out and not rewards:
        told = f"{function} fails on each of the samples that it was called on: {errors[0]}"
        if len(errors) < calls:
            told += f"; there was time for {len(errors)} of {calls} calls"
        return fail("reward", told, faster, key=KEY)
    if broken and not timed_out:
        told = f"{function} fails on each of the samples that it was called on: {broken[0].errors[0]}"
        fix = "make it return a number for any completion; where it raises or returns none, nothing can be trained"
        return fail("reward", told, fix, key=KEY)
    if errors:
        told = f"{function} fails on {len(errors)} of {len(errors) + len(rewards)} samples: {errors[0]}"
        fix = "see whether it gives a number for any completion: each failure costs a trajectory or its group"
        return warn("reward", told, faster if timed_out else fix, key=KEY)
    if timed_out:
        told = (
            f"{function} runs longer than {reward.timeout_s:g} s (reward.timeout_s) on {timed_out} of {calls} samples"
        )
        then = f"such a response gets the reward {reward.on_timeout:g} (reward.on_timeout)"
        return warn("reward", f"{told}; {then}", "make it faster, or raise reward.timeout_s", key=KEY)
    if not rewards:
        return ok("reward", f"{function} can be called", key=KEY)
    shown = listed([f"{reward:.4g}" for reward in rewards])
    return ok("reward", f"{function} can be called, and gives on samples: {shown}", key=KEY)

"""The user's code, tried in processes of its own: reward function, code that plays episodes, loss and advantage.

So code that exits, hangs, eats memory or prints without end costs that process and nothing else. Each is found as it is
found in the run; a reward function is called on sample rows, loss and advantage on a few made-up tokens, and no episode
is played: a command's program is looked for, and the script that an interpreter is given. A reward's call on one
sample may fail by that sample, or by a completion that no model would write: a function that fails on each sample of
a set is an error, one that fails on some a warning. A call that runs over its time is a warning, too, unless all do
for which there was time and reward.on_timeout gives such a response no reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checks.findings import Finding, fail, listed, ok, warn
from asyncrl.checks.inputs import Sample
from asyncrl.checks.process import ask_process
from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig, RewardConfig
from asyncrl.data.columns import column_of
from asyncrl.episodes.episode_pool import EpisodePool
from asyncrl.errors import ConfigError, DeadlineExceeded, EpisodeWorkersEnded, RewardFailed
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.reward.judges import JUDGES
from asyncrl.reward.judges.judge_pool import JudgePool, for_trial
from asyncrl.reward.scoring.reward_pool import RewardPool
from asyncrl.workers.confinement import Confinement

IMPORT_S = 45.0
"""Longest time for importing the user's module; pool and episode host have more, so that this is no error."""
CALLS_S = 12.0
"""Longest time for all calls together; reward.timeout_s, by default less, bounds each of them too."""
PLAIN = "I am not sure. The answer is 42."
"""Completion that a model might give to anything."""
KEY = "reward.function"
NOWHERE = "http://127.0.0.1:9/v1"
"""Address of an endpoint of which nothing is asked."""
ALGORITHM = "asyncrl.learner.functions.trial"
TRIAL_S = 60.0
"""Longest time for the trial (s); importing torch takes most."""
KEYS = ("loss", "loss_options", "correction", "kl", "entropy_bonus", "teacher", "advantage", "advantage_options")


@dataclass
class Trial:
    """The outcome of the calls on the samples of one set of prompts."""

    rewards: list[float] = field(default_factory=list)
    """Rewards of the completions; a call on a whole group gives one for each of them."""
    errors: list[str] = field(default_factory=list)
    """Reasons of failures, with the place of the row: one for each call that failed."""
    answered: int = 0
    """Calls that gave rewards."""


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

    async def score(self, asked: Score) -> Scores:
        """Rewards by the function. Raises RewardFailed."""
        return await self._pool.score(asked)

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
                        trial.answered += 1
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
        answer = column_of(sample.row, column)
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
        called = len(errors) + sum(trial.answered for trial in trials.values())
        told = f"{function} fails on {len(errors)} of {called} samples: {errors[0]}"
        fix = "see whether it gives a number for any completion: each failure costs a trajectory or its group"
        return warn("reward", told, faster if timed_out else fix, key=KEY)
    if timed_out:
        told = (
            f"{function} runs longer than {reward.timeout_s:g} s (reward.timeout_s) on {timed_out} of {calls} samples"
        )
        then = "such a response counts as failed"
        if isinstance(reward.on_timeout, float):
            then = f"such a response gets the reward {reward.on_timeout:g} (reward.on_timeout)"
        return warn("reward", f"{told}; {then}", "make it faster, or raise reward.timeout_s", key=KEY)
    if not rewards:
        return ok("reward", f"{function} can be called", key=KEY)
    shown = listed([f"{reward:.4g}" for reward in rewards])
    return ok("reward", f"{function} can be called, and gives on samples: {shown}", key=KEY)


async def check_episode(config: Config, *, import_s: float = IMPORT_S) -> Finding:
    """Whether the configured episode can be played."""
    episode = config.episode
    if importlib.util.find_spec("aiohttp") is None:
        fix = "pip install 'asyncrl[episodes]', on each host that plays episodes"
        return fail("episode", "the endpoint of episodes needs aiohttp, which is not installed", fix)
    key = f"episode.{episode.kind}"
    if episode.kind == "command":
        return check_command(episode.command)
    one = episode.model_copy(update={"workers": 1})
    confined = Confinement(config.security.user_environment)
    pool = EpisodePool(one, model="", base_url=NOWHERE, confined=confined, start_timeout_s=import_s)
    code = ", ".join(episode.tools) or episode.function or episode.env
    try:
        await pool.start()
    except ConfigError as error:
        fix = f"correct {key} and episode.options; modules have to be installed or lie where you launch"
        return fail("episode", listed(error.problems), fix)
    except EpisodeWorkersEnded as error:
        return fail("episode", f"importing {code}: it {error.reason}", f"mend what {code} does when imported", key=key)
    except DeadlineExceeded:
        told = f"importing {code} takes more than {import_s:g} s"
        return warn("episode", told, "see what its module does when it is imported; each worker does it", key=key)
    finally:
        await pool.close()
    return ok("episode", f"{code} can be played", key=key)


def check_command(command: list[str]) -> Finding:
    """Whether the program and its script are there."""
    program = shutil.which(command[0])
    if program is None:
        there = "is no program that can be run" if os.path.exists(command[0]) else "is not there"
        fix = "install it where you launch, on each host with rollouters, or give its path"
        return fail("episode", f"{command[0]} {there}", fix, key="episode.command")
    script = next((word for word in command[1:2] if word.endswith((".py", ".sh", ".js"))), None)
    if script is not None and not Path(script).exists():
        fix = f"correct it: paths count from where you launch ({os.getcwd()})"
        return fail("episode", f"{script} is not there", fix, key="episode.command")
    return ok("episode", f"{program} is there", key="episode.command")


def is_default(config: LearnerConfig) -> bool:
    """Whether there is nothing to be tried: the loss and the advantage are those of a configuration without keys."""
    default = LearnerConfig()
    return config.backend == "sim" or all(getattr(config, key) == getattr(default, key) for key in KEYS)


async def check_algorithm(config: Config, *, limit_s: float = TRIAL_S) -> Finding | None:
    """Whether loss and advantage can be called; None where there is nothing to be tried."""
    learner = config.learner
    if is_default(learner):
        return None
    try:
        arguments = [str(config.rollout.samples_per_prompt)]
        answer, ended = await ask_process(ALGORITHM, arguments, learner.model_dump_json().encode(), limit_s)
        problems = json.loads(answer)
    except TimeoutError:
        told = f"{learner.loss} and {learner.advantage} were not tried within {limit_s:g} s"
        return warn("algorithm", told, "see what their modules do when they are imported", key="learner.loss")
    except ValueError:
        told = f"the process that tries them ended: {ended}"
        return fail("algorithm", told, "mend what their modules do when imported", key="learner.loss")
    if problems:
        fix = "correct these keys; modules of your own have to be installed or lie where you launch"
        return fail("algorithm", listed(problems), fix)
    return ok("algorithm", f"{learner.loss} with {learner.advantage} can be called", key="learner.loss")

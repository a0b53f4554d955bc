"""Checks of the user's code, each in a process of its own: reward, episode, loss, advantage and curriculum.

Code that exits, hangs, eats memory or prints without end harms that process only. The reward function is called on
sample rows, loss and advantage on a few made-up tokens. An episode's code is imported and not played; for a command,
its program is looked up, and the script that an interpreter is given.

One call of a reward function may fail because of its sample, or of a completion that no model would write. So it is an
error if the function fails on every sample of a set, and a warning if it fails on some. A call over its time makes all
failures a warning, unless no call gives a reward, not even by reward.on_timeout. That is an error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig, RewardConfig
from asyncrl.core.errors import ConfigError, DeadlineExceeded, EpisodeWorkersEnded, RewardFailed
from asyncrl.core.formatting import name_some, printable
from asyncrl.data.rows import column_of
from asyncrl.episodes.episode_pool import EpisodePool
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn
from asyncrl.launcher.checks.inputs import Sample
from asyncrl.launcher.checks.process import NoAnswer, call
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.reward.functions import JUDGES
from asyncrl.reward.judge_pool import JudgePool, for_trial
from asyncrl.reward.reward_pool import RewardPool
from asyncrl.workers.confinement import Confinement

IMPORT_S = 45.0
"""Deadline for importing the user's module (s). The run allows more, so a longer import is only a warning."""
CALLS_S = 12.0
"""Deadline for all calls together (s); reward.timeout_s bounds each call too."""
PLAIN = "I am not sure. The answer is 42."
"""A completion that a model might give to any prompt."""
SHOWN_COMPLETION = 40
KEY = "reward.function"
NOWHERE = "http://127.0.0.1:9/v1"
"""Address of an endpoint that is never called, because no episode is played."""
ALGORITHM = "asyncrl.learner.algorithm.user_functions:problems_of"
CURRICULUM = "asyncrl.dataloader.curriculum:problems_of"
TRIAL_S = 60.0
"""Deadline for the trial of loss and advantage (s); importing torch takes most of it."""
KEYS = ("loss", "loss_options", "correction", "kl", "entropy_bonus", "teacher", "advantage", "advantage_options")
"""Keys of ``learner`` that choose loss and advantage."""


@dataclass
class Trial:
    """The outcome of the calls on the samples of one set of prompts."""

    rewards: list[float] = field(default_factory=list)
    """The reward of each completion; a call on a whole group gives one for each of its completions."""
    errors: list[str] = field(default_factory=list)
    """For each call that failed, the reason and the FILE:LINE of its row."""
    answered: int = 0
    """Number of calls that returned rewards."""
    shown: list[str] = field(default_factory=list)
    """For each completion, its reward, the reward's components and its first characters, as text."""

    def add(self, scores: Scores, completions: Sequence[Completion]) -> None:
        """Add the result of one call that returned rewards."""
        self.answered += 1
        self.rewards += scores.rewards
        for reward, components, completion in zip(scores.rewards, scores.components, completions, strict=True):
            self.shown.append(f'{reward:.4g}{_parts(components)} for "{printable(completion.text[:SHOWN_COMPLETION])}"')


def _parts(components: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:.4g}' for name, value in components.items())})" if components else ""


class RewardTrial:
    """Tries the reward function in a process, which ends with the context. Samples may be read while it starts."""

    def __init__(self, config: Config, *, import_s: float = IMPORT_S, calls_s: float = CALLS_S) -> None:
        self._reward, self._group_size = config.reward, config.rollout.samples_per_prompt
        self._import_s, self._calls_s = import_s, calls_s
        self._own_options = {each.name: each.reward_options for each in config.data.mixture if each.reward is not None}
        """Options of the sources of a mixture that have a reward of their own."""
        single = self._reward.model_copy(update={"workers": 1})
        arguments: dict[str, Any] = {
            "max_tokens": config.rollout.max_tokens,
            "confined": Confinement(config.security.user_environment),
            "start_timeout_s": import_s,
        }
        self._pool: RewardPool | JudgePool
        if single.function in JUDGES:
            self._pool = JudgePool(for_trial(single), **arguments)
        else:
            self._pool = RewardPool(single, sources=config.data.mixture, **arguments)

    async def __aenter__(self) -> RewardTrial:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def start(self) -> Finding | None:
        """Start the process and import the function. Returns a finding if that fails or takes too long, else None."""
        fix = "correct reward.function and reward.options; install the module, or put it where you launch"
        try:
            await self._pool.start()
        except ConfigError as error:
            return fail("reward", name_some(error.problems), fix)
        except RewardFailed as error:
            return fail("reward", f"importing {self._reward.function}: it {error.reason}", fix, key=KEY)
        except DeadlineExceeded:
            text = f"importing {self._reward.function} takes more than {self._import_s:g} s, so it was not called"
            fix = "see what its module does when it is imported; each worker of the pool imports it too"
            return warn("reward", text, fix, key=KEY)
        return None

    async def score(self, request: Score) -> Scores:
        """Call the reward function once. Raises RewardFailed."""
        return await self._pool.score(request)

    async def call(self, samples: Sequence[Sample]) -> Finding:
        """Call the function on each sample until the time is over, and judge the results.

        If not even the first call ends in that time, the finding is a warning.
        """
        trials: dict[str, Trial] = {}
        calls = list(_calls(self._reward, samples, self._group_size, self._own_options))
        try:
            async with asyncio.timeout(self._calls_s):
                for sample, completions in calls:
                    trial = trials.setdefault(sample.key, Trial())
                    request = Score(
                        uid="1/0",
                        source=sample.source,
                        prompt=sample.prompt,
                        row=sample.row,
                        completions=completions,
                    )
                    try:
                        trial.add(await self._pool.score(request), completions)
                    except RewardFailed as error:
                        of_source = f" (data.source {sample.source})" if sample.source else ""
                        trial.errors.append(f"{error.reason}, on {sample.place}{of_source}")
        except TimeoutError:
            if not any(trial.rewards or trial.errors for trial in trials.values()):
                text = f"{self._reward.function} was called, and did not answer within {self._calls_s:g} s"
                fix = f"make it end within reward.timeout_s = {self._reward.timeout_s:g}"
                return warn("reward", text, fix, key=KEY)
        return judge(self._reward, trials, calls=len(calls), timed_out=self._pool.counters.timed_out)


def _calls(
    reward: RewardConfig, samples: Sequence[Sample], group_size: int, own_options: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[Sample, list[Completion]]]:
    """Yield the arguments of each call: a sample, and completions for it that a model might give.

    The completions are the row's answer, if it has one, and PLAIN. With reward.per = "group" a call gets ``group_size``
    completions, which repeat these two; else each call gets one.
    """
    for sample in samples:
        column = own_options.get(sample.source, reward.options).get("answer_key", "answer")
        answer = column_of(sample.row, column)
        texts = [str(answer), PLAIN] if isinstance(answer, str | int | float) else [PLAIN]
        completions = [Completion(text=text, finish_reason="stop", tokens=max(1, len(text.split()))) for text in texts]
        if reward.per == "group":
            yield sample, (completions * group_size)[:group_size]
        else:
            yield from ((sample, [completion]) for completion in completions)


def judge(reward: RewardConfig, trials: dict[str, Trial], *, calls: int, timed_out: int) -> Finding:
    """Turn the results of all calls into one finding, by the rules in the module's docstring. Pure.

    ``trials`` has the outcome by set of prompts. ``calls`` were planned, ``timed_out`` of them timed out.
    """
    function = reward.function
    errors = [error for trial in trials.values() for error in trial.errors]
    shown = [text for trial in trials.values() for text in trial.shown]
    is_scored = any(trial.rewards for trial in trials.values())
    # Sets on which every call failed.
    failing = [trial for trial in trials.values() if trial.errors and not trial.rewards]
    faster = "make it faster, raise reward.timeout_s, or set reward.on_timeout to the reward of such a response"
    if timed_out and not is_scored:
        text = f"{function} fails on each sample that it was called on: {errors[0]}"
        if len(errors) < calls:
            text += f"; there was time for {len(errors)} of {calls} calls"
        return fail("reward", text, faster, key=KEY)
    if failing and not timed_out:
        text = f"{function} fails on each sample that it was called on: {failing[0].errors[0]}"
        fix = "make it return a number for any completion; nothing can be trained if it raises or returns None"
        return fail("reward", text, fix, key=KEY)
    if errors:
        called = len(errors) + sum(trial.answered for trial in trials.values())
        text = f"{function} fails on {len(errors)} of {called} samples: {errors[0]}"
        fix = "make it return a number for any completion: each failure costs a trajectory or its group"
        return warn("reward", text, faster if timed_out else fix, key=KEY)
    if timed_out:
        text = (
            f"{function} runs longer than {reward.timeout_s:g} s (reward.timeout_s) on {timed_out} of {calls} samples"
        )
        consequence = "such a response counts as failed"
        if isinstance(reward.on_timeout, float):
            consequence = f"such a response gets the reward {reward.on_timeout:g} (reward.on_timeout)"
        return warn("reward", f"{text}; {consequence}", "make it faster, or raise reward.timeout_s", key=KEY)
    if not is_scored:
        return ok("reward", f"{function} can be called", key=KEY)
    return ok("reward", f"{function} can be called, and gives on samples: {name_some(shown)}", key=KEY)


async def check_episode(config: Config, *, import_s: float = IMPORT_S) -> Finding:
    """Check that the configured episode can be played: import its code in a worker, or find the command's program."""
    episode = config.episode
    if importlib.util.find_spec("aiohttp") is None:
        fix = "pip install 'asyncrl[episodes]', on each host that plays episodes"
        return fail("episode", "the endpoint of episodes needs aiohttp, which is not installed", fix)
    key = f"episode.{episode.kind}"
    if episode.kind == "command":
        return check_command(episode.command)
    single = episode.model_copy(update={"workers": 1})
    confined = Confinement(config.security.user_environment)
    pool = EpisodePool(single, model="", base_url=NOWHERE, confined=confined, start_timeout_s=import_s)
    code = ", ".join(episode.tools) or episode.function or episode.env
    try:
        await pool.start()
    except ConfigError as error:
        fix = f"correct {key} and episode.options; install modules, or put them where you launch"
        return fail("episode", name_some(error.problems), fix)
    except EpisodeWorkersEnded as error:
        return fail("episode", f"importing {code}: it {error.reason}", f"correct the import of {code}", key=key)
    except DeadlineExceeded:
        text = f"importing {code} takes more than {import_s:g} s"
        return warn("episode", text, "see what its module does when it is imported; each worker imports it", key=key)
    finally:
        await pool.close()
    return ok("episode", f"{code} can be played", key=key)


def check_command(command: list[str]) -> Finding:
    """Check that the program of an episode's command exists, and the command's second word if it is a script."""
    program = shutil.which(command[0])
    if program is None:
        problem = "is no program that can be run" if os.path.exists(command[0]) else "is missing"
        fix = "install it where you launch, on each host that plays episodes, or give its path"
        return fail("episode", f"{command[0]} {problem}", fix, key="episode.command")
    script = next((word for word in command[1:2] if word.endswith((".py", ".sh", ".js"))), None)
    if script is not None and not Path(script).exists():
        fix = f"correct it: paths are relative to where you launch ({os.getcwd()})"
        return fail("episode", f"{script} is missing", fix, key="episode.command")
    return ok("episode", f"{program} can be run", key="episode.command")


def is_default(config: LearnerConfig) -> bool:
    """Whether there is nothing to try: loss and advantage are the defaults, or the learner is simulated."""
    default = LearnerConfig()
    return config.backend == "sim" or all(getattr(config, key) == getattr(default, key) for key in KEYS)


async def check_curriculum(config: Config, *, limit_s: float = IMPORT_S) -> Finding | None:
    """Call the user's function of the curriculum in a process; None without one."""
    function = config.data.curriculum.function
    if function is None:
        return None
    return await _try("curriculum", "data.curriculum.function", function, CURRICULUM, limit_s, config=config)


async def check_algorithm(config: Config, *, limit_s: float = TRIAL_S) -> Finding | None:
    """Call loss and advantage once on made-up tokens in a process; None if they are the defaults."""
    learner, samples = config.learner, config.rollout.samples_per_prompt
    if is_default(learner):
        return None
    tried = f"{learner.loss} with {learner.advantage}"
    return await _try("algorithm", "learner.loss", tried, ALGORITHM, limit_s, config=learner, samples=samples)


async def _try(check: str, key: str, tried: str, function: str, limit_s: float, **arguments: Any) -> Finding:
    """Call ``function`` in a process: it calls the user's code, ``tried``, and returns its problems."""
    try:
        problems = await call(function, list[str], limit_s, **arguments)
    except TimeoutError:
        text = f"the trial of {tried} did not end within {limit_s:g} s"
        return warn(check, text, "see what your module does when it is imported", key=key)
    except NoAnswer as error:
        text = f"the process that tries {tried} ended: {error}"
        return fail(check, text, "correct the import of your module", key=key)
    if problems:
        fix = "correct these keys; install modules of your own, or put them where you launch"
        return fail(check, name_some(problems), fix)
    return ok(check, f"{tried} can be called", key=key)

"""A process that samples a few responses and scores them: ``python -m asyncrl.doctor.generate.generator``.

It reads an Order on standard input and writes an Answer to standard output. Prompts, sampling, engine, episodes and
reward are those of the run; the weights are the model's own, without an adapter, whose first version changes nothing.

Invariant: the engine, the reward's workers and the processes of an agent have ended before the answer is written. Each
fault is in the answer, with the samples made before it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, nullcontext
from typing import Any, TypeVar

import msgspec

from asyncrl.chat.renderer import Renderer, make_renderer
from asyncrl.checks.first_prompts import FirstPrompt, first_prompts
from asyncrl.checks.user_code import RewardTrial
from asyncrl.config import Config
from asyncrl.config.load import config_from_json, validate_config
from asyncrl.doctor.agent.rehearsal import CannotPlay, Rehearsal
from asyncrl.doctor.generate.model_weights import stage_model
from asyncrl.errors import AsyncRLError, ConfigError, EngineDied
from asyncrl.messages.groups import Lease, Trajectory
from asyncrl.messages.reward import Completion, Score
from asyncrl.rollouter.engines import engine_parsers, make_engine
from asyncrl.rollouter.episode.figures import EpisodeFigures
from asyncrl.rollouter.episode.player import EpisodePlayer
from asyncrl.rollouter.episode.sessions import Sessions
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall, TrajectoryFailed, single_turn
from asyncrl.rollouter.serving.group_events import CallAccount, GroupAccount
from asyncrl.runtime.awaits import Awaits
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.linux import die_with_parent
from asyncrl.stops import resolve_stops
from asyncrl.telemetry.metrics import Figures, Histograms
from asyncrl.telemetry.samples import SampleGroup, SampleTrajectory
from asyncrl.telemetry.states import StateLedger
from asyncrl.tokenizer import tokenizer_of
from asyncrl.trajectories import sampled_tokens

ENGINE = "rollouter/0"
PRINTED_BYTES = 4000
T = TypeVar("T")


class Order(msgspec.Struct, frozen=True):
    """The configuration as JSON, and the number of prompts."""

    config: str
    count: int


class Answer(msgspec.Struct):
    """The samples that were made, and the reasons why there are no more."""

    groups: list[SampleGroup] = []
    problems: list[str] = []
    printed: str = ""
    """The end of what engine and agent printed, where there are problems."""


async def generate(config: Config, count: int) -> Answer:
    """Sample and score responses to the first prompts of the data. Never raises."""
    answer = Answer([], [])
    try:
        async with AsyncExitStack() as stack:
            generator = Generator(_with_model_alone(config))
            await generator.start(stack)
            for number, prompt in enumerate(first_prompts(config, generator.tokenizer, count)):
                answer.groups.append(await generator.while_engine_lives(generator.group(prompt, number)))
        if not answer.groups:
            answer.problems.append("data: none of its first rows is a prompt that fits data.max_prompt_tokens")
    except ConfigError as error:
        answer.problems += error.problems
    except ImportError as error:
        answer.problems.append(
            f"rollout.engine: {config.rollout.engine} needs a package that cannot be imported ({error}); install it"
        )
    except (AsyncRLError, OSError, ValueError, MemoryError, TrajectoryFailed, CannotPlay) as error:
        answer.problems.append(str(error) or type(error).__name__)
    return answer


def _with_model_alone(config: Config) -> Config:
    """The configuration without adapters, with one process for users' code."""
    tree = config.model_dump(mode="json")
    tree["lora"] = {}
    tree["episode"]["workers"] = tree["reward"]["workers"] = 1
    return validate_config(tree)


class Generator:
    """The rollouter of a dry run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.tokenizer = tokenizer_of(config)
        self._stops = resolve_stops(config.rollout, self.tokenizer)
        self._clock = Clock()
        self._host = EngineHost(
            config,
            lambda: make_engine(config, ENGINE),
            self._clock,
            StateLedger(self._clock.now, "engine"),
            Awaits(self._clock.now),
        )
        self._trial: RewardTrial | None = None
        self._renderer: Renderer | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        """Bring up the reward function and the engine; ``stack`` ends them. Raises ConfigError and AsyncRLError."""
        config = self._config
        if config.reward.function != "episode":
            trial = self._trial = await stack.enter_async_context(RewardTrial(config))
            if problem := await trial.start():
                raise ConfigError([problem.told])
        if config.episode.kind != "single":
            self._renderer = await asyncio.to_thread(
                make_renderer,
                config,
                self.tokenizer,
                stop_ids=self._stops.token_ids,
                engine_parsers=engine_parsers(config),
            )
        stack.push_async_callback(self._host.close)
        await self._host.start()
        with closing(await asyncio.to_thread(stage_model, config)) as staged:
            await self._host.pause(staged.version)
            await self._host.load(staged)
        await self._host.commit()

    async def while_engine_lives(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises EngineDied: in a run the calls of a dead engine wait for the next one."""
        died, working = asyncio.ensure_future(self._host.died.wait()), asyncio.ensure_future(work)
        try:
            await asyncio.wait({died, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineDied(ENGINE, self._host.reason.removeprefix(f"engine {ENGINE}: "))
            return working.result()
        finally:
            for task in (died, working):
                task.cancel()
            await asyncio.gather(died, working, return_exceptions=True)

    async def group(self, prompt: FirstPrompt, number: int) -> SampleGroup:
        """One response to a prompt; as many as a group has where the reward function scores whole groups."""
        lease = self._lease(prompt, number)
        account = GroupAccount(lease, self._clock.now, self._clock.wall)
        trajectories = await asyncio.gather(*(self._trajectory(lease, each) for each in account.samples))
        await self._score(lease, trajectories)
        return SampleGroup([_shown(each) for each in trajectories], kind="generated", uid=lease.uid, prompt=prompt.text)

    def _lease(self, prompt: FirstPrompt, number: int) -> Lease:
        rollout = self._config.rollout
        return Lease(
            uid=f"0-{number}",
            number=1,
            purpose="train",
            epoch=0,
            index=number,
            param_version=0,
            prompt_ids=prompt.ids,
            prompt=prompt.text,
            row=prompt.row,
            samples=rollout.samples_per_prompt if self._config.reward.per == "group" else 1,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
        )

    async def _trajectory(self, lease: Lease, account: Any) -> Trajectory:
        if self._renderer is not None:
            return await self._episode(lease)
        return await single_turn(self.call(lease, account.call()), lease, account.sample, self._stops, self.tokenizer)

    def slot(self, account: CallAccount) -> AbstractAsyncContextManager[None]:
        """A place in the engine, whose own queue holds what is too much."""
        return nullcontext()

    def call(self, lease: Lease, account: CallAccount, **watch: Any) -> PolicyCall:
        """A call of the policy."""
        return PolicyCall(self._host, self.tokenizer, self._config, lease, account, **watch)

    async def _episode(self, lease: Lease) -> Trajectory:
        """Play an episode with the engine as its policy."""
        assert self._renderer is not None
        rehearsal = Rehearsal(self._config, self.tokenizer, self._renderer, self._clock)
        sessions = Sessions(
            self._config,
            renderer=self._renderer,
            tokenizer=self.tokenizer,
            stops=self._stops,
            policy=self,
            hosts=rehearsal,
            figures=EpisodeFigures(Figures(), Histograms()),
            clock=self._clock,
        )
        player = EpisodePlayer(self._config, sessions, rehearsal, clock=self._clock)
        try:
            async with rehearsal.hosting(sessions):
                await rehearsal.play(player, lease)
        finally:
            sessions.close()
        if rehearsal.trajectory is None:
            raise CannotPlay(f"the episode of prompt {lease.uid} failed: {rehearsal.failure}")
        return rehearsal.trajectory

    async def _score(self, lease: Lease, trajectories: list[Trajectory]) -> None:
        """Score what the episode has not scored itself. Raises RewardFailed."""
        if self._trial is None or (self._config.reward.per == "trajectory" and trajectories[0].reward is not None):
            return
        completions = [
            Completion(
                text=each.text,
                finish_reason=each.finish_reason,
                tokens=sampled_tokens(each),
                messages=each.messages,
                branches=each.branches,
            )
            for each in trajectories
        ]
        scores = await self._trial.score(
            Score(uid=lease.uid, prompt=lease.prompt, row=lease.row, completions=completions)
        )
        for each, reward, components in zip(trajectories, scores.rewards, scores.components, strict=True):
            each.reward, each.components = reward, components


def _shown(trajectory: Trajectory) -> SampleTrajectory:
    return SampleTrajectory(
        sample=trajectory.sample,
        text=trajectory.text,
        messages=trajectory.messages,
        finish_reason=trajectory.finish_reason,
        reward=trajectory.reward,
        components=dict(trajectory.components),
        length=sampled_tokens(trajectory),
        turns=trajectory.turns,
    )


def main() -> None:
    """Answer the order on standard input."""
    die_with_parent(signal.SIGKILL)
    answers = os.dup(1)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    with tempfile.TemporaryFile() as printed:
        # Engines and users' modules print, from processes of their own too.
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        answer = asyncio.run(generate(config_from_json(order.config), order.count))
        sys.stdout.flush()
        sys.stderr.flush()
        if answer.problems:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - PRINTED_BYTES))
            answer.printed = printed.read().decode(errors="replace")
    data = msgspec.msgpack.encode(answer)
    while data:
        data = data[os.write(answers, data) :]
    # Threads of a library's own must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()

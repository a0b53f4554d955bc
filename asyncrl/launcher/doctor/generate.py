"""``asyncrl-launch CONFIG --dry-run --generate N``: a process samples a few responses and scores them.

The command calls ``generate_here`` in a process (checks/process.py), under a deadline. Prompts, sampling, engine,
episodes and reward are those of the run. The weights are the model's own, without an adapter, because an adapter's
first version changes nothing. A dry run has no learner, so tensors are copied from the safetensors files into sealed
memory, as an engine loads them.

Invariant: the engine, the reward's workers and the agent's processes have ended before the answer is written. The
answer has the fault that ended the sampling, and the samples made before it. When ``print_generated`` returns, the
process and its descendants have ended and their temporary files are gone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, closing
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.config import Config
from asyncrl.config.hub import localized
from asyncrl.config.load import validate_config
from asyncrl.core.errors import AsyncRLError, ConfigError, EngineDied
from asyncrl.core.formatting import say
from asyncrl.core.model_files import COMPUTED, DTYPES, Tensor, Unreadable, read_header
from asyncrl.launcher.checks.inputs import FirstRow, first_rows
from asyncrl.launcher.checks.process import NoAnswer, call
from asyncrl.launcher.checks.user_code import RewardTrial
from asyncrl.launcher.checks.weights import weight_files
from asyncrl.launcher.doctor.lone_episode import CannotPlay, LoneEpisode, lone_lease
from asyncrl.messages.groups import Lease, Trajectory, completion_of, sampled_tokens
from asyncrl.messages.reward import Score
from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.observe.sample_text import sample_page
from asyncrl.observe.samples import SampleGroup, SampleTrajectory
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rollouter.engines import engine_parsers, make_engine
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.generation import PolicyCall, PolicyRequest, SingleTurn, TrajectoryFailed
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.renderer import Renderer, make_renderer
from asyncrl.text.stops import resolve_stops
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of
from asyncrl.weights.held_version import HeldVersion, Segment, place_tensors

ENGINE = "rollouter/0"
PRINTED_BYTES = 4000
T = TypeVar("T")
GENERATE = "asyncrl.launcher.doctor.generate:generate_here"
SAMPLE_S = 120.0
"""Longest time for sampling a response (s); the configuration bounds rewards and episodes."""
COPIED_BYTES = 64 << 20


class Answer(msgspec.Struct):
    """The samples that were made, and the reasons why others were not."""

    groups: list[SampleGroup] = []
    problems: list[str] = []
    printed: str = ""
    """The end of what the process and its children printed, if there are problems."""


async def generate(config: Config, count: int) -> Answer:
    """Sample and score responses to the first prompts of the data. Expected errors become problems of the answer."""
    answer = Answer([], [])
    try:
        async with AsyncExitStack() as stack:
            generator = Generator(_without_adapters(config))
            await generator.start(stack)
            for number, prompt in enumerate(islice(_prompts(config, generator.tokenizer), count)):
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


def _prompts(config: Config, tokenizer: Tokenizer) -> Iterator[FirstRow]:
    """Yield the prompts of the training data that a run would use, in order, one of each source in turn."""
    sources = [
        (row for row in first_rows(config, data, tokenizer, strict=True) if _fits(row, data.max_prompt_tokens))
        for data in config.training_sets.values()
    ]
    for rows in zip_longest(*sources):
        yield from (row for row in rows if row is not None)


def _fits(row: FirstRow, most_tokens: int) -> bool:
    return row.ids is not None and 0 < len(row.ids) <= most_tokens


def _without_adapters(config: Config) -> Config:
    """Return the configuration without adapters, and with one process each for episode code and reward."""
    tree = config.model_dump(mode="json")
    tree["lora"] = {}
    tree["episode"]["workers"] = tree["reward"]["workers"] = 1
    return validate_config(tree)


class Generator:
    """Samples responses from one engine, and scores them; takes the place of a rollouter."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.tokenizer = tokenizer_of(config)
        self._stops = resolve_stops(config.rollout, self.tokenizer)
        self._clock = Clock()
        self._engine_manager = EngineManager(
            config,
            lambda: make_engine(config, ENGINE),
            self._clock,
            StateLedger(self._clock.now, "engine"),
            Awaits(self._clock.now),
        )
        self._trial: RewardTrial | None = None
        """The reward function; None before ``start``, and if only episodes give rewards."""
        self._renderer: Renderer | None = None
        """Renders the contexts of episodes; None before ``start``, and for single responses."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the reward function and the engine, and load the model's weights into the engine.

        ``stack`` ends both. Raises ConfigError and AsyncRLError.
        """
        config = self._config
        if not config.only_episodes_score:
            trial = self._trial = await stack.enter_async_context(RewardTrial(config))
            if problem := await trial.start():
                raise ConfigError([problem.text])
        if config.episode.kind != "single":
            parsers = engine_parsers(config)
            self._renderer = await asyncio.to_thread(make_renderer, config, self.tokenizer, engine_parsers=parsers)
        stack.push_async_callback(self._engine_manager.close)
        await self._engine_manager.start()
        with closing(await asyncio.to_thread(stage_model, config)) as staged:
            await self._engine_manager.pause(staged.version)
            await self._engine_manager.load(staged)
        await self._engine_manager.commit()

    async def while_engine_lives(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result. If the engine dies first, cancels ``work`` and raises EngineDied.

        Without this, calls would wait for the next engine, as they do in a run.
        """
        died, working = asyncio.ensure_future(self._engine_manager.died.wait()), asyncio.ensure_future(work)
        try:
            await asyncio.wait({died, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineDied(ENGINE, self._engine_manager.reason.removeprefix(f"engine {ENGINE}: "))
            return working.result()
        finally:
            for task in (died, working):
                task.cancel()
            await asyncio.gather(died, working, return_exceptions=True)

    async def group(self, prompt: FirstRow, number: int) -> SampleGroup:
        """Sample and score one response to a prompt, or a whole group if the reward function scores groups.

        ``number`` is the position of the prompt, from 0.
        """
        assert prompt.ids is not None
        samples = self._config.rollout.samples_per_prompt if self._config.reward.per == "group" else 1
        lease = lone_lease(
            self._config, number, prompt.ids, prompt.text, prompt.row, samples=samples, source=prompt.source
        )
        events = GroupEvents(lease, self._clock.now, self._clock.wall)
        trajectories = await asyncio.gather(*(self._trajectory(lease, each) for each in events.samples))
        await self._score(lease, trajectories)
        return SampleGroup(
            [_as_sample(each) for each in trajectories], kind="generated", uid=lease.uid, prompt=prompt.text
        )

    async def _trajectory(self, lease: Lease, events: Any) -> Trajectory:
        if self._renderer is not None:
            return await self._episode(lease)
        return await SingleTurn(self, self._stops, self.tokenizer).play(lease, events)

    async def generate(self, request: PolicyRequest) -> None:
        """Answer a call of the policy. The engine queues calls beyond its limit."""
        await PolicyCall(self._engine_manager, self.tokenizer, self._config, request).generate()

    async def _episode(self, lease: Lease) -> Trajectory:
        """Play an episode with the engine as its policy. Raises CannotPlay if it gives no trajectory."""
        assert self._renderer is not None
        episode = LoneEpisode(self._config, self.tokenizer, self._renderer, self._clock, self)
        await episode.play(lease)
        if episode.trajectory is None:
            raise CannotPlay(f"the episode of prompt {lease.uid} failed: {episode.failure}")
        return episode.trajectory

    async def _score(self, lease: Lease, trajectories: list[Trajectory]) -> None:
        """Set each trajectory's reward by the reward function, unless the episode gave one. Raises RewardFailed."""
        if self._trial is None or (self._config.reward.per == "trajectory" and trajectories[0].reward is not None):
            return
        completions = [completion_of(each) for each in trajectories]
        scores = await self._trial.score(
            Score(uid=lease.uid, source=lease.source, prompt=lease.prompt, row=lease.row, completions=completions)
        )
        for each, reward, components in zip(trajectories, scores.rewards, scores.components, strict=True):
            each.reward, each.components = reward, components
        for each, judgement in zip(trajectories, scores.judgements, strict=False):
            each.judgement = judgement


def _as_sample(trajectory: Trajectory) -> SampleTrajectory:
    return SampleTrajectory(
        sample=trajectory.sample,
        text=trajectory.text,
        messages=trajectory.messages,
        finish_reason=trajectory.finish_reason,
        reward=trajectory.reward,
        components=dict(trajectory.components),
        judgement=trajectory.judgement,
        length=sampled_tokens(trajectory),
        turns=trajectory.turns,
    )


# --- the model's weights ---


def stage_model(config: Config) -> HeldVersion:
    """Copy the model's weights into sealed memory, as version 0; the caller closes it.

    Without a model, a simulated engine gets one small tensor. Raises ConfigError.
    """
    buckets: list[tuple[Bucket, int]] = []
    try:
        if config.model.path is None:
            buckets.append(_make_bucket([("weights", "uint8", (1,))], {}, None))
        else:
            # Adds each bucket once it is made, so that an error at a later file closes it.
            buckets.extend(map(_copy_file, _safetensors_files(Path(config.model.path))))
        manifest = Manifest(version=0, buckets=[bucket for bucket, _ in buckets])
        return HeldVersion(manifest, [descriptor for _, descriptor in buckets])
    except BaseException:
        for _, descriptor in buckets:
            os.close(descriptor)
        raise


def _safetensors_files(folder: Path) -> list[Path]:
    try:
        files = list(weight_files(folder))
    except Unreadable as error:
        raise ConfigError([f"model.path: {folder}: {error}"]) from None
    if any(path.suffix != ".safetensors" for path in files):
        raise ConfigError([f"model.path: {folder} has no safetensors files, which --generate needs"])
    return files


def _copy_file(path: Path) -> tuple[Bucket, int]:
    """Copy a safetensors file into one bucket; return it with the descriptor of its memory. Raises ConfigError."""
    try:
        tensors = {name: each for name, each in read_header(path).items() if not COMPUTED.search(name)}
    except Unreadable as error:
        raise ConfigError([f"model.path: {path.parent}: {error}"]) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError([f"model.path: {path}: {name} has the dtype {tensor.dtype}, which is not trained"])
    return _make_bucket([(name, DTYPES[each.dtype], each.shape) for name, each in tensors.items()], tensors, path)


def _make_bucket(
    shapes: list[tuple[str, str, tuple[int, ...]]], tensors: Mapping[str, Tensor], path: Path | None
) -> tuple[Bucket, int]:
    """Create a bucket for tensors of these names, dtypes and shapes; return it with the descriptor of its memory.

    ``tensors`` has the byte range of each in the file ``path``. Without a file the bucket holds zeros.
    """
    specs, size = place_tensors(shapes)
    segment = Segment("asyncrl-model", size)
    try:
        if path is not None:
            with path.open("rb") as file:
                for spec in specs:
                    file.seek(tensors[spec.name].start)
                    offset, remaining = spec.offset, tensors[spec.name].size
                    while remaining and (data := file.read(min(remaining, COPIED_BYTES))):
                        segment.write(offset, data)
                        offset, remaining = offset + len(data), remaining - len(data)
        return segment.seal(specs), segment.fd
    except BaseException:
        segment.discard()
        raise


# --- the command and its process ---


def print_generated(config: Config, count: int) -> None:
    """Sample ``count`` prompts in a process and print the samples. Then raises ConfigError if one could not be made."""
    limit_s = longest_s(config, count)
    say(f"sampling {count} prompts with the engine {config.rollout.engine} (at most {limit_s:g} s)", sys.stderr)
    try:
        # If the process is killed, its temporary files go with this folder.
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            asked = call(GENERATE, Answer, limit_s, env={"TMPDIR": folder}, config=config, count=count)
            answer = asyncio.run(asked)
    except TimeoutError:
        engine = config.rollout.engine
        raise ConfigError(
            [f"--generate: the engine {engine} did not answer {count} prompts within {limit_s:g} s"], found=True
        ) from None
    except NoAnswer as error:
        # The kernel kills the process if the model does not fit into memory.
        raise ConfigError([f"--generate: the process that samples ended: {error}"], found=True) from None
    for line in ["", *sample_page(answer.groups)] if answer.groups else []:
        say(line, sys.stdout)
    if answer.printed:
        say("last output of the engine, the agent and the reward:", sys.stderr)
        say(answer.printed.removesuffix("\n"), sys.stderr)
    if answer.problems:
        raise ConfigError([f"--generate: {problem}" for problem in answer.problems], found=True)


def longest_s(config: Config, count: int) -> float:
    """Return the longest time for starting the engine, loading the weights and sampling ``count`` prompts (s)."""
    episode = config.episode
    prompt_s = SAMPLE_S + config.reward.timeout_s
    if episode.kind != "single":
        prompt_s += episode.start_timeout_s + episode.timeout_s + episode.close_timeout_s
    return config.supervision.start_timeout_s + config.weights.deadline_s + count * prompt_s


def generate_here(config: Config, count: int) -> Answer:
    """Generate in this process, whose standard error is a file with everything printed (checks/process.py)."""
    answer = asyncio.run(generate(localized(config), count))
    sys.stdout.flush()
    sys.stderr.flush()
    if answer.problems:
        end = os.lseek(2, 0, os.SEEK_END)
        answer.printed = os.pread(2, PRINTED_BYTES, max(0, end - PRINTED_BYTES)).decode(errors="replace")
    return answer

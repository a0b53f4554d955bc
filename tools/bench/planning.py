"""``python -m tools.bench planning``: the time that the learner stands still between two steps, because one is planned.

The learner's own loop takes groups, plans, trains and counts versions. Groups arrive before they are needed, and the
simulated learner trains, which only takes time. One side plans each step while the one before is trained, as a run
does, the other when it begins. The result is the time from the end of a training to the beginning of the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, cast

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.progress import Progress
from asyncrl.learner.loop.training import Training
from asyncrl.learner.loop.version_schedule import VersionSchedule
from asyncrl.messages.dataloader import Supply
from asyncrl.messages.groups import Group, Lease, Trajectory, VersionSpan
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.observe.group_log import GroupLog
from asyncrl.observe.logging import get_logger
from asyncrl.observe.metrics import Counters, Histograms
from asyncrl.observe.states import StateLedger
from asyncrl.observe.trace import STEPS, Trace
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.services import ActorServices, Clock
from tools.bench.paired import compare, measure_pairs
from tools.bench.report import Report, Target

GROUPS, SAMPLES = 64, 16
TOKENS = 1_000_000
"""Tokens of a step, at the least."""
PROMPT, LONGEST, SIGMA = 128, 8192, 0.9
RANKS, BUDGET = 8, 16384
"""Ranks that a step is planned for."""
TRAIN_S = 1.0
PAUSE_S = 0.01
"""Time between two looks for groups that are missing."""
WARM_UP = 1
"""Gaps that are left out, while no step was trained that another could be planned beside."""
TARGET = 0.2


def config(steps: int) -> Config:
    """A version after each step."""
    return validate_config(
        {
            "data": {"source": "synthetic", "max_prompt_tokens": PROMPT},
            "rollout": {"engine": "sim", "gpus_per_replica": 0, "samples_per_prompt": SAMPLES, "max_tokens": LONGEST},
            "reward": {"function": "constant"},
            "learner": {
                "backend": "sim",
                "ranks": RANKS,
                "steps": steps,
                "groups_per_step": GROUPS,
                "tokens_per_microbatch": BUDGET,
                "sim": {"step_s": TRAIN_S},
            },
        }
    )


def make_groups() -> list[Group]:
    """Groups of a step of ``TOKENS`` and a little more, of lognormal lengths."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(0.0, SIGMA, (GROUPS, SAMPLES))
    scale = TOKENS / drawn.sum()
    lengths = np.clip(scale * drawn, 2, LONGEST).astype(int)
    while lengths.sum() + lengths.size * (PROMPT - 1) < TOKENS:
        lengths = np.minimum(lengths + lengths // 10 + 1, LONGEST)
    return [_group(random, index, lengths[index].tolist()) for index in range(GROUPS)]


def _group(random: np.random.Generator, index: int, lengths: Sequence[int]) -> Group:
    trajectories = [
        Trajectory(
            sample=sample,
            sequences=[
                TokenSequence(
                    tokens=random.integers(0, 50_000, length).astype(np.int32),
                    logprobs=-random.random(length).astype(np.float32),
                    spans=[VersionSpan(0, 0, length)],
                )
            ],
            finish_reason="stop",
            text="",
            reward=float(random.random()),
        )
        for sample, length in enumerate(lengths)
    ]
    lease = Lease(
        uid=f"0-{index}",
        number=index + 1,
        purpose="train",
        epoch=0,
        index=index,
        param_version=0,
        prompt_ids=random.integers(0, 50_000, PROMPT).astype(np.int32),
        prompt="",
        row={},
        samples=len(lengths),
        temperature=1.0,
        max_tokens=LONGEST,
    )
    return Group(lease=lease, trajectories=trajectories)


def numbered(groups: Sequence[Group]) -> Iterator[Group]:
    """Groups without an end: the same responses again under the next uids."""
    for index, group in enumerate(itertools.cycle(groups)):
        lease = msgspec.structs.replace(group.lease, uid=f"0-{index}", number=index + 1, index=index)
        yield msgspec.structs.replace(group, lease=lease)


class TimedTrainer(SimTrainer):
    """Notes when it trains (monotonic, s) and what."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        self.times: list[tuple[float, float]] = []
        self.plans: list[StepPlan] = []

    def train(self, plan: StepPlan) -> dict[str, float]:
        began = time.monotonic()
        found = super().train(plan)
        self.times.append((began, time.monotonic()))
        self.plans.append(plan)
        return found

    @property
    def gaps(self) -> list[float]:
        """Seconds from the end of each training to the begin of the next one."""
        return [after[0] - before[1] for before, after in itertools.pairwise(self.times)]


class Versions:
    """The numbers of versions that nobody takes up."""

    spoiled = False
    whole = -1

    def __init__(self) -> None:
        self.next_number = 0
        self.metrics: dict[str, float] = {}

    async def make(self, probed: object) -> int:
        self.next_number += 1
        return self.next_number - 1

    async def settled(self) -> bool:
        return True


class _Dataloader:
    """A dataloader that never runs out."""

    limit = 1.0
    supply = Supply(number=0, exhausted=False, outstanding=0)

    def changed(self) -> None:
        """Nobody asks."""


class _Checkpoints:
    """A run without checkpoints."""

    overdue = False


class _Lines:
    """Lines of metrics that are read through ``lines`` alone."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    async def put(self, step: Any) -> None:
        self.lines.append(step.line)


class Loop:
    """The learner's loop on its own. ``groups`` come whenever fewer than a step's and one more are in the buffer."""

    def __init__(self, config: Config, groups: Iterator[Group], trainer: TimedTrainer | None = None) -> None:
        self.trainer = TimedTrainer(config) if trainer is None else trainer
        self.counters, self.versions, self._lines = Counters(), Versions(), _Lines()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self.dataloader = _Dataloader()
        self._groups, self._wanted, clock = groups, config.learner.groups_per_step + 1, Clock()
        self._intake = Intake(config.learner)
        trace = Trace(clock.now, clock.wall, window_s=0.0)

        self.progress = Progress()
        shared = ActorServices(
            name="learner/0",
            clock=clock,
            log=get_logger("learner/0"),
            counters=self.counters,
            histograms=Histograms(),
            awaits=Awaits(clock.now),
            states=StateLedger(clock.now, "rank"),
            notify=lambda *told, **more: None,
            progress=lambda: None,
        )
        schedule = VersionSchedule(
            config,
            shared,
            progress=self.progress,
            intake=self._intake,
            dataloader=cast(Any, self.dataloader),
            published=lambda version: None,
        )
        schedule.use(cast(Any, self.versions))
        self.training = Training(
            config,
            shared,
            progress=self.progress,
            backend=self.trainer,
            thread=self._thread,
            intake=self._intake,
            dataloader=cast(Any, self.dataloader),
            versions=cast(Any, self.versions),
            schedule=schedule,
            lines=cast(Any, self._lines),
            checkpoints=cast(Any, _Checkpoints()),
            group_log=GroupLog("learner/0"),
            track=trace.track("steps", STEPS),
            supervised=None,
            teacher=None,
        )

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of its steps."""
        return self._lines.lines

    async def run(self, *, ahead: bool) -> None:
        """Run to the last step."""
        # In this order, so that the first step begins before anything is planned.
        works = [self.training.plan_early()] if ahead else []
        beside = [asyncio.create_task(work) for work in (*works, self._deliver())]
        try:
            await self.training.begin([])
            await self.training.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            self.training.close()
            self._thread.shutdown()

    def deliver(self, group: Group) -> None:
        """A group comes."""
        self._intake.deliver(group)
        self.progress.news.announce()

    async def _deliver(self) -> None:
        while True:
            while len(self._intake.buffer) < self._wanted:
                self.deliver(next(self._groups))
            await asyncio.sleep(PAUSE_S)


async def measure(report: Report, *, pairs: int, steps: int) -> None:
    """Fill the report."""
    groups, chosen = make_groups(), config(steps + WARM_UP + 1)
    report.settings |= {"groups": GROUPS, "samples": SAMPLES, "ranks": RANKS, "train_s": TRAIN_S, "steps": steps}
    planned: dict[bool, list[float]] = {True: [], False: []}

    def side(*, ahead: bool) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            loop = Loop(chosen, numbered(groups), TimedTrainer(chosen))
            await loop.run(ahead=ahead)
            report.settings["tokens_per_step"] = loop.trainer.plans[0].tokens
            planned[ahead] += [line["time/plan_s"] for line in loop.lines[WARM_UP + 1 :]]
            return median(loop.trainer.gaps[WARM_UP:])

        return once

    beside, at_begin = side(ahead=True), side(ahead=False)
    report.same("planning_gap", compare(await measure_pairs(at_begin, at_begin, pairs)))
    found = compare(await measure_pairs(beside, at_begin, pairs))
    sides = ("planned during the step before", "planned when it begins")
    report.comparison("planning_gap", found, unit="s", sides=sides, target=Target("<=", TARGET))
    report.figures["plan_s"] = {"beside": median(planned[True]), "at_begin": median(planned[False])}

"""The learner's own loop by itself: it takes groups, plans, trains and counts versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from learner.publishing.lone_versions import LoneVersions

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.training import Training
from asyncrl.messages.dataloader import DataloaderStatus
from asyncrl.messages.groups import Group
from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.observe.group_log import GroupLog
from asyncrl.observe.logging import get_logger
from asyncrl.observe.states import StateLedger
from asyncrl.observe.trace import STEPS, Trace
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.services import ActorServices, Clock

PAUSE_S = 0.01
"""Time between two looks for groups that are missing."""


class NotingTrainer(SimTrainer):
    """Notes what it trains."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        self.plans: list[StepPlan] = []

    def train(self, plan: StepPlan) -> dict[str, float]:
        found = super().train(plan)
        self.plans.append(plan)
        return found


class _Dataloader:
    """A dataloader that never runs out."""

    limit = 1.0
    status = DataloaderStatus(number=0, exhausted=False, outstanding=0)

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

    def __init__(self, config: Config, groups: Iterator[Group], trainer: NotingTrainer | None = None) -> None:
        self.trainer = NotingTrainer(config) if trainer is None else trainer
        self.counters, self._lines = Counters(), _Lines()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self.dataloader = _Dataloader()
        self._groups, self._wanted, clock = groups, config.learner.groups_per_step + 1, Clock()
        self._intake = Intake(config.learner)
        trace = Trace(clock.now, clock.wall, window_s=0.0)

        self.progress = TrainingProgress()
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
        self.versions = LoneVersions(
            config, shared, progress=self.progress, intake=self._intake, dataloader=self.dataloader
        )
        self.training = Training(
            config,
            shared,
            progress=self.progress,
            backend=self.trainer,
            thread=self._thread,
            intake=self._intake,
            dataloader=cast(Any, self.dataloader),
            versions=self.versions,
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

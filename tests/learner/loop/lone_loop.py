"""The learner's own loop by itself: it takes groups, plans, trains and counts versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from learner.publishing.lone_versions import LoneVersions
from services import services

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.training import Training
from asyncrl.messages.dataloader import DataloaderStatus
from asyncrl.messages.groups import Group
from asyncrl.observe.group_log import GroupLog
from asyncrl.observe.trace import STEPS, Trace
from asyncrl.rpc.services import Clock

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


class EndlessDataloader:
    """A dataloader that never runs out."""

    limit = 1.0
    status = DataloaderStatus(number=0, exhausted=False, outstanding=0)

    def changed(self) -> None:
        """Nobody asks."""


class LoneTraining:
    """The training of a learner without other actors, and what it reads and changes."""

    def __init__(self, config: Config, backend: Any, *, clock: Clock, dataloader: Any, step: int = 0) -> None:
        self.lines: list[dict[str, Any]] = []
        """Lines of its steps."""
        self.written: list[int] = []
        """Steps at which a checkpoint began."""
        self.has_room_again = False
        """Whether a disk that was full has room again."""
        self.backend, self.dataloader = backend, dataloader
        self.intake, self.progress = Intake(config.learner), TrainingProgress(step=step)
        self._thread, shared = ThreadPoolExecutor(1, thread_name_prefix="train"), services(clock=clock)
        self.counters = shared.counters
        self.versions = LoneVersions(config, shared, progress=self.progress, intake=self.intake, dataloader=dataloader)

        async def put(trained: Any) -> None:
            self.lines.append(trained.line)

        async def has_room_again() -> bool:
            return self.has_room_again

        async def begin_checkpoint() -> None:
            self.written.append(self.progress.step)

        self.training = Training(
            config,
            shared,
            progress=self.progress,
            backend=backend,
            thread=self._thread,
            intake=self.intake,
            dataloader=dataloader,
            versions=self.versions,
            lines=cast(Any, SimpleNamespace(put=put)),
            writer=cast(Any, SimpleNamespace(has_room_again=has_room_again)),
            begin_checkpoint=begin_checkpoint,
            group_log=GroupLog("learner/0"),
            track=Trace(clock.now, clock.wall, window_s=0.0).track("steps", STEPS),
            supervised=None,
            teacher=None,
        )

    def deliver(self, group: Group) -> None:
        """A group comes."""
        self.intake.deliver(group)
        self.progress.news.announce()

    def close(self) -> None:
        """End its threads."""
        self.training.close()
        self._thread.shutdown()


class Loop(LoneTraining):
    """The learner's loop on its own. ``groups`` come whenever fewer than a step's and one more are in the buffer."""

    def __init__(self, config: Config, groups: Iterator[Group], trainer: NotingTrainer | None = None) -> None:
        self.trainer = NotingTrainer(config) if trainer is None else trainer
        super().__init__(config, self.trainer, clock=Clock(), dataloader=EndlessDataloader())
        self._groups, self._wanted = groups, config.learner.groups_per_step + 1

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
            self.close()

    async def _deliver(self) -> None:
        while True:
            while len(self.intake.buffer) < self._wanted:
                self.deliver(next(self._groups))
            await asyncio.sleep(PAUSE_S)

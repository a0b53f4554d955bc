"""The wait for the groups of each step.

The learner waits for groups, never for a replica or a disk. The wait ends when a step's groups are in the buffer, or
when no more will come. Meanwhile an overdue version is tried again, at times that no other event postpones.

Fails with CannotLearn when too many groups cannot be trained, and with ActorFailed when no version can be published for
too long.
"""

from __future__ import annotations

import asyncio

from asyncrl.config import Config
from asyncrl.config.operation import LAST_GROUPS_SHARE
from asyncrl.core.errors import CannotLearn
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.progress import Progress
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.loop.step_planner import StepPlanner
from asyncrl.learner.loop.version_schedule import VersionSchedule
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices


class StepGroups:
    """The groups of the steps to come."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        progress: Progress,
        intake: Intake,
        dataloader: DataloaderLink,
        schedule: VersionSchedule,
        planner: StepPlanner,
        teacher: ServedTeacher | None,
        track: Track,
    ) -> None:
        self.waited = False
        """Whether the step that begins had to wait for groups."""
        self._config, self._name = config, services.name
        self._states, self._clock = services.states, services.clock
        self._log, self._awaits = services.log, services.awaits
        self._progress, self._news = progress, progress.news.listen()
        self._intake, self._dataloader, self._schedule = intake, dataloader, schedule
        self._planner, self._teacher, self._track = planner, teacher, track

    async def wait(self) -> bool:
        """Wait until a step's groups, or the last ones, are in the buffer; False when the run is preempted instead."""
        with self._awaits.on("rollouter", "groups"):
            return await self._wait()

    async def _wait(self) -> bool:
        intake = self._intake
        self._track.enter("wait for groups", step=self._progress.step + 1)
        wanted = self._begin_wait()
        self.waited = len(intake.buffer) < wanted
        give_up_at, retry_at = self._schedule.give_up_at, self._schedule.next_try
        while True:
            self._news.clear()
            if problem := intake.problem():
                raise CannotLearn(self._name, problem)
            if self._progress.preempted:
                await self._take_the_last()
                return False
            supply = self._dataloader.supply
            are_last = supply.exhausted and supply.outstanding == len(intake.buffer) > 0
            if (len(intake.buffer) >= wanted or are_last) and self._are_scored(wanted):
                return True
            if not self._schedule.is_overdue:
                await self._news.wait()
                continue
            try:
                # A deadline, so that a stream of news does not postpone the version.
                async with asyncio.timeout(max(0.0, retry_at - self._clock.now())):
                    await self._news.wait()
            except TimeoutError:
                await self._schedule.retry(give_up_at)
                # Under the new version the step may wait for more groups.
                wanted = self._begin_wait()
                retry_at = self._schedule.next_try

    def _begin_wait(self) -> int:
        """Have the next step planned early; the number of groups that it waits for."""
        self._states.enter("waiting", "groups")
        step = self._progress.next_step
        self._planner.plan_early(step)
        return step.groups_wanted(self._config)

    def _are_scored(self, wanted: int) -> bool:
        """Whether a teacher on a server has scored the groups that come next."""
        buffer = self._intake.buffer
        uids = set(buffer.oldest(wanted))
        return self._teacher is None or self._teacher.has_done([g for g in buffer.groups if g.lease.uid in uids])

    async def _take_the_last(self) -> None:
        """Wait, for a limited time, until the rollouters have delivered or returned their groups."""
        self._states.enter("waiting", "last groups")
        within, dataloader = LAST_GROUPS_SHARE * self._config.preempt.grace_s, self._dataloader
        try:
            async with asyncio.timeout(within):
                while not (dataloader.supply.exhausted and dataloader.supply.outstanding <= len(self._intake.buffer)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._log.warning("not all groups came in before the checkpoint", waited_s=within)

"""Waits for the groups of each step.

The wait is for groups, never for a replica or a disk. It ends when a step's groups are there, or all that are ever to
come; and a version that is owed is tried again meanwhile, at times that no news puts off.

Fails with ActorFailed when the run cannot go on: without a signal, or without a version for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncrl.config import Config
from asyncrl.config.operation import LAST_GROUPS_SHARE
from asyncrl.errors import CannotLearn
from asyncrl.learner.boundaries import Boundaries
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.steps.plan_ahead import Outlook, groups_wanted, oldest_groups
from asyncrl.messages.groups import Group
from asyncrl.runtime.services import ActorServices
from asyncrl.telemetry.trace import Track


class StepGroups:
    """The groups of the steps to come. ``next_step`` tells which comes next, ``preempted`` whether the run makes way;
    ``foresee`` is called with the step when its groups may have become others.
    """

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        intake: Intake,
        supply: DataloaderLink,
        boundaries: Boundaries,
        teacher: ServedTeacher | None,
        track: Track,
        next_step: Callable[[], Outlook],
        preempted: Callable[[], bool],
        foresee: Callable[[Outlook], None],
    ) -> None:
        self.news = asyncio.Event()
        """Set when there are new groups, there is new supply, or the run makes way."""
        self.waited = False
        """Whether the step that begins had to wait for groups."""
        self._config, self._name = config, services.name
        self._states, self._clock = services.states, services.clock
        self._log, self._awaits = services.log, services.awaits
        self._intake, self._supply, self._boundaries = intake, supply, boundaries
        self._teacher, self._track = teacher, track
        self._next_step, self._preempted, self._foresee = next_step, preempted, foresee

    async def there(self) -> bool:
        """Wait until a step's groups are there, or all that are ever to come are; False when the run makes way instead.

        Raises CannotLearn when too many groups cannot be trained.
        """
        with self._awaits.on("rollouter", "groups"):
            return await self._there()

    def foreseen(self, step: Outlook) -> Sequence[Group]:
        """The groups that this step would have if it began now; none where that is not known yet."""
        buffer = self._intake.buffer
        return buffer.look_up(oldest_groups(buffer, step, self._config))

    async def _there(self) -> bool:
        intake, step = self._intake, self._next_step()
        self._states.enter("waiting", "groups")
        self._track.enter("wait for groups", step=step.step)
        wanted = groups_wanted(step, self._config)
        self._foresee(step)
        self.waited = len(intake.buffer) < wanted
        owed_until, retry_at = self._boundaries.patient_until, self._boundaries.next_try
        while True:
            self.news.clear()
            if problem := intake.problem():
                raise CannotLearn(self._name, problem)
            if self._preempted():
                await self._take_the_last()
                return False
            supply = self._supply.supply
            are_last = supply.exhausted and supply.outstanding == len(intake.buffer) > 0
            if (len(intake.buffer) >= wanted or are_last) and self._are_scored(wanted):
                return True
            if not self._boundaries.owes:
                await self.news.wait()
                continue
            try:
                # News that come again and again must not put it off.
                async with asyncio.timeout(max(0.0, retry_at - self._clock.now())):
                    await self.news.wait()
            except TimeoutError:
                await self._boundaries.publish_owed(owed_until)
                # Under the new version the step may wait for more groups.
                step = self._next_step()
                wanted = groups_wanted(step, self._config)
                self._foresee(step)
                self._states.enter("waiting", "groups")
                retry_at = self._boundaries.next_try

    def _are_scored(self, wanted: int) -> bool:
        """Whether a teacher on a server has done with the groups that come next."""
        buffer = self._intake.buffer
        uids = set(buffer.oldest(wanted))
        return self._teacher is None or self._teacher.has_done([g for g in buffer.groups if g.lease.uid in uids])

    async def _take_the_last(self) -> None:
        """Wait until the rollouters have delivered or returned their groups, or for as long as that may take."""
        self._states.enter("waiting", "last groups")
        within = LAST_GROUPS_SHARE * self._config.preempt.grace_s
        try:
            async with asyncio.timeout(within):
                while not (
                    self._supply.supply.exhausted and self._supply.supply.outstanding <= len(self._intake.buffer)
                ):
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            self._log.warning("not all groups came in before the checkpoint", waited_s=within)

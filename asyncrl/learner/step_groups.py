"""The groups of each step: waited for, given back where they are too late, and chosen.

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
from asyncrl.learner.groups.late import to_requeue
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.stragglers import Stragglers
from asyncrl.learner.steps.plan_ahead import Outlook, groups_wanted, oldest_groups
from asyncrl.messages.groups import Group
from asyncrl.runtime.services import ActorServices
from asyncrl.telemetry.group_log import NOT_TRAINED, StoryLog
from asyncrl.telemetry.trace import Track
from asyncrl.trajectories import oldest_version


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
        story: StoryLog,
        track: Track,
        next_step: Callable[[], Outlook],
        preempted: Callable[[], bool],
        foresee: Callable[[Outlook], None],
    ) -> None:
        self.news = asyncio.Event()
        """Set when there are new groups, there is new supply, or the run makes way."""
        self.waited = False
        """Whether the step that begins had to wait for groups."""
        self.uids: tuple[str, ...] = ()
        """Uids of the step that begins; empty for the oldest."""
        self._config, self._name = config, services.name
        self._states, self._counters, self._clock = services.states, services.counters, services.clock
        self._log, self._awaits = services.log, services.awaits
        self._intake, self._supply, self._boundaries = intake, supply, boundaries
        self._teacher, self._story, self._track = teacher, story, track
        self._next_step, self._preempted, self._foresee = next_step, preempted, foresee
        # Under the limit 0 all groups are of one version.
        waits = config.staleness.late == "wait" and config.staleness.max
        self._stragglers = Stragglers(config, supply, intake, services) if waits else None

    async def there(self) -> bool:
        """Wait until a step's groups are there, or all that are ever to come are; False when the run makes way instead.

        Raises CannotLearn when too many groups cannot be trained.
        """
        with self._awaits.on("rollouter", "groups"):
            try:
                return await self._there()
            finally:
                if self._stragglers is not None:
                    self._stragglers.close()

    def foreseen(self, step: Outlook) -> Sequence[Group]:
        """The groups that this step would have if it began now; none where that is not known yet."""
        buffer, requeues = self._intake.buffer, self._intake.ledger.requeues
        if self._stragglers is not None:
            return buffer.look_up(self._stragglers.foreseen(step.version, step.unpublished))
        return buffer.look_up(oldest_groups(buffer, requeues, step, self._config))

    def taken(self) -> dict[str, float]:
        """Figures of the wait for late groups of the step that is taken now."""
        return {} if self._stragglers is None else self._stragglers.taken()

    async def _there(self) -> bool:
        intake, step = self._intake, self._next_step()
        self._states.enter("waiting", "groups")
        self._track.enter("wait for groups", step=step.step)
        wanted = groups_wanted(step, self._config)
        self._requeue_late()
        self._foresee(step)
        self.waited = len(intake.buffer) < wanted
        self.uids = ()
        owed_until, retry_at = self._boundaries.patient_until, self._boundaries.next_try
        while True:
            self.news.clear()
            self._requeue_late()
            if problem := intake.problem():
                raise CannotLearn(self._name, problem)
            if self._preempted():
                await self._take_the_last()
                return False
            supply = self._supply.supply
            if len(intake.buffer) >= wanted:
                if await self._is_chosen():
                    if self._are_scored(wanted):
                        return True
                elif not self._awaited:
                    # The dataloader did not answer.
                    continue
            elif supply.exhausted and supply.outstanding == len(intake.buffer) > 0 and self._are_scored(wanted):
                return True
            if not self._boundaries.owes or (self._awaited and not self._boundaries.spoiled):
                # A new version would make the group late that is waited for. One whose weights are lost has to be: an
                # engine that has died may need them for that very group.
                await self.news.wait()
                continue
            try:
                # News that come again and again must not put it off.
                async with asyncio.timeout(max(0.0, retry_at - self._clock.now())):
                    await self.news.wait()
            except TimeoutError:
                await self._boundaries.publish_owed(owed_until)
                # Under the new version the step may begin with other groups, and wait for more.
                step = self._next_step()
                wanted = groups_wanted(step, self._config)
                self._foresee(step)
                self._states.enter("waiting", "groups")
                retry_at = self._boundaries.next_try

    async def _is_chosen(self) -> bool:
        """Whether the step need not wait for a group that it would make late."""
        if self._stragglers is None:
            return True
        step = self._next_step()
        self.uids = await self._stragglers.step(step.version, step.unpublished)
        if self._awaited and self._states.awaiting != self._awaited:
            self._states.enter("waiting", self._awaited)
            self._track.enter("wait for late group", step=step.step, group=self._awaited)
        return bool(self.uids)

    @property
    def _awaited(self) -> str:
        """The straggler, in a few words; empty where none is waited for."""
        return "" if self._stragglers is None else self._stragglers.waits_for

    def _requeue_late(self) -> None:
        """Give groups back that are too stale and may be generated again."""
        staleness, intake, version = self._config.staleness, self._intake, self._boundaries.version
        if staleness.late != "requeue":
            return
        late = to_requeue(intake.buffer.groups, intake.ledger.requeues, version, staleness)
        for group in intake.requeue(late):
            uid = group.ticket.uid
            age = version - (oldest_version(group) or 0)
            reason = f"{age} versions old, over staleness.max = {staleness.max}; it is generated again"
            self._log.info("group requeued", uid=uid, versions_old=age, requeues=intake.ledger.requeues[uid])
            self._story.tell(NOT_TRAINED, uid=uid, reason=reason, outcome="requeued")
            self._counters.add("staleness/requeued_groups")
        if late:
            if self._teacher is not None:
                # The next group under these uids is another response.
                self._teacher.keep(intake.claims)
            self._supply.changed()

    def _are_scored(self, wanted: int) -> bool:
        """Whether a teacher on a server has done with the groups that come next."""
        buffer = self._intake.buffer
        uids = set(self.uids or buffer.oldest(wanted))
        return self._teacher is None or self._teacher.has_done([g for g in buffer.groups if g.ticket.uid in uids])

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

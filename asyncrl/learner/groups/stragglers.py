"""The groups of the next step under staleness.late = "wait", and the group that it waits for where it has to.

The dataloader is asked for the outstanding groups: when the step would need a group that came since the last answer,
and while it waits, whenever something new came or was taken back; so about once for each step. No step is chosen by an
answer that is too old to be safe (late.py). The wait stands among this actor's awaits for as long as it lasts, and in
the log; it ends because every grant does: by delivery, by its return, or with its holder's death.

The gate needs no progress of the learner for an outstanding group: it is generated, or granted again, while training
goes on. A version that is owed to a full disk is not published meanwhile, one that nobody can load is.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.learner.groups.dataloader_link import DATALOADER, DataloaderLink
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.late import Calendar, NextGroups, choose_step
from asyncrl.messages.dataloader import GrantsOpen, OpenGrant
from asyncrl.runtime.awaits import Await
from asyncrl.runtime.services import ActorServices


class Stragglers:
    """The choice of the next step, and its wait for a late group."""

    def __init__(self, config: Config, supply: DataloaderLink, intake: Intake, services: ActorServices) -> None:
        self._learner, self._limit = config.learner, config.staleness.max
        self._supply, self._intake = supply, intake
        self._counters, self._clock = services.counters, services.clock
        self._log, self._awaits = services.log, services.awaits
        self._told = GrantsOpen(supply_number=-1, grants=[])
        self._known: set[str] = set()
        """Uids that were granted before the dataloader's last answer."""
        self._waiting: tuple[str, Await, float] | None = None
        """Words, await and beginning of the wait for a group."""
        self.waited_s = 0.0
        """Seconds waited for the step that comes next."""
        self.waited_groups = 0
        self._counters["staleness/waited_groups"] = 0

    @property
    def waits_for(self) -> str:
        """The group that is waited for, in a few words; empty while it waits for nothing."""
        return "" if self._waiting is None else self._waiting[0]

    async def step(self, version: int, unpublished: int) -> tuple[str, ...]:
        """Uids of the next step; none while it ``waits_for`` a group, or where the dataloader has not answered.

        ``unpublished`` steps were trained since ``version`` was published. A step's groups are in the buffer.
        """
        while True:
            choice = self._choose(version, unpublished)
            if choice.step:
                self._wait_for(None, version)
                return choice.step
            if choice.waits_for is not None and self._is_up_to_date:
                self._wait_for(choice.waits_for, version)
                return ()
            # These are read before the question: a group that comes meanwhile may be of a grant unknown to the answer.
            buffered = self._intake.buffer.uids
            told = await self._supply.open_grants()
            if told is None:
                return ()
            self._told = told
            self._known = {*buffered, *(grant.uid for grant in told.grants)}

    def foreseen(self, version: int, unpublished: int) -> tuple[str, ...]:
        """Uids of the step under that version, as far as the dataloader has told so far; none where it has to wait."""
        return self._choose(version, unpublished).step

    def taken(self) -> dict[str, float]:
        """Figures of the step that is taken now."""
        found = {"time/wait_for_late_s": self.waited_s, "staleness/waited_groups": float(self.waited_groups)}
        self.waited_s, self.waited_groups = 0.0, 0
        return found

    def close(self) -> None:
        """Wait for nothing any more."""
        self._wait_for(None, 0)

    def _choose(self, version: int, unpublished: int) -> NextGroups:
        size, per_version = self._learner.groups_per_step, self._learner.steps_per_version
        # While a version is owed, more steps may be unpublished than make one.
        left = max(1, per_version - unpublished) * size
        calendar = Calendar(version, left, per_version * size, self._limit)
        outstanding = [grant for grant in self._told.grants if not self._intake.has(grant.uid)]
        return choose_step(self._intake.buffer, self._known, outstanding, calendar, size)

    @property
    def _is_up_to_date(self) -> bool:
        """Whether nothing is to be learnt from another answer just now."""
        seen_all = self._known.issuperset(self._intake.buffer.uids)
        return seen_all and self._told.supply_number >= self._supply.supply.number

    def _wait_for(self, grant: OpenGrant | None, version: int) -> None:
        words = "" if grant is None else f"group {grant.uid} of {grant.rollouter or 'nobody'}"
        if self._waiting is not None:
            known, wait, since = self._waiting
            if words == known:
                return
            wait.end()
            self.waited_s += self._clock.now() - since
            self._waiting = None
        if grant is None:
            return
        old = version - grant.served_version
        wait = self._awaits.on(grant.rollouter or DATALOADER, f"group {grant.uid}, {old} versions old")
        wait.begin()
        self._waiting = words, wait, self._clock.now()
        self.waited_groups += 1
        self._counters.add("staleness/waited_groups")
        self._log.info(
            "waits for a group that another step would make late",
            uid=grant.uid,
            rollouter=grant.rollouter,
            versions_old=old,
            granted_s_ago=None if grant.age_s is None else round(grant.age_s, 3),
        )

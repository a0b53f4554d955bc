"""Turns of leases in the engine, and the leases that were in the death of one. Pure but for the futures that wait.

A suspect (messages/groups.py) has the engine alone. A lease that runs alone waits until all others are done, and those
that ask after it wait. Turns are given in the order of asking, so neither starves. The samples of a lease that runs
alone run together, until all are done or the engine dies. Invariants: while a lease runs alone no other is inside; each
that asks gets a turn once those before it are done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from asyncrl.messages.groups import Lease, after_death, runs_alone, verdict


class EngineTurns:
    """The turns in one rollouter's engines, and their deaths by lease."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._deaths: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self.own_deaths = 0
        """Deaths while a lease ran alone, over all leases."""
        self.failed = 0
        """Leases that have failed."""
        self._blamed = ""
        """The lease of the last death that was excused, until a submission has ended in good order."""
        self.excused = False
        """Whether the last death was that of a prompt which ran alone. Not where one prompt after the other dies and
        nothing else works: that is the engine."""
        self._inside: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], Lease] = {}
        """Leases that wait, in the order of asking."""
        self.lone: str | None = None
        """Uid of the lease that runs alone now."""
        self._ending = False
        """Whether its turn is over as soon as its samples are out."""
        self.lone_turns = 0
        """Times that a lease has had the engine for itself."""

    # --- turns ---

    async def take(self, lease: Lease) -> None:
        """Wait for a turn; ``give_back`` ends it. Ends when those before it are done, or with the task that waits."""
        leased: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[leased] = lease
        self._lease()
        try:
            await leased
        except asyncio.CancelledError:
            if leased.cancelled():
                self._waiting.pop(leased, None)
                self._lease()
            else:
                # It was given the turn in the same moment.
                self.give_back(lease)
            raise

    def give_back(self, lease: Lease) -> None:
        """End one turn of a lease."""
        self._inside[lease.uid] -= 1
        if not self._inside[lease.uid]:
            del self._inside[lease.uid]
            if self.lone == lease.uid:
                self.lone, self._ending = None, False
        self._lease()

    def _lease(self) -> None:
        while self.lone is None and self._waiting:
            leased, lease = next(iter(self._waiting.items()))
            # Looked at only now: the lease may have become suspect while it waited.
            if leased.cancelled() or not runs_alone(self.deaths(lease)):
                self._enter(leased)
            elif self._inside:
                # Nothing is aborted for it: under on_update = drain a response is to have one version, and an engine
                # that has just died, which is when suspects come up, is empty anyway.
                return
            else:
                self.lone = lease.uid
                self.lone_turns += 1
        # After its death those that wait come first: what works is not kept waiting by what kills.
        if self.lone is not None and not self._ending:
            for leased in [leased for leased, lease in self._waiting.items() if lease.uid == self.lone]:
                self._enter(leased)

    def _enter(self, leased: asyncio.Future[None]) -> None:
        lease = self._waiting.pop(leased)
        # The task that waited may have been cancelled and not have run since.
        if not leased.cancelled():
            self._inside[lease.uid] += 1
            leased.set_result(None)

    # --- deaths ---

    def died(self, inside: Sequence[Lease], reason: str) -> None:
        """An engine died with submissions of these leases in it. One that ran alone is put behind those that wait."""
        alone = bool(inside) and self.lone is not None
        for lease in inside:
            self._deaths[lease.uid] = after_death(self.deaths(lease), alone=alone)
            self._reasons[lease.uid] = reason
            self.own_deaths += alone
            self.failed += alone and self.failure(lease) is not None
        self.excused = alone and self._blamed in ("", self.lone)
        if self.excused:
            self._blamed = self.lone or ""
        self._ending = self.lone is not None

    def worked(self) -> None:
        """A submission has ended in good order: the engine works."""
        self._blamed = ""

    def deaths(self, lease: Lease) -> int:
        """Deaths of its prompt, those at earlier holders included."""
        return max(lease.attempt, self._deaths.get(lease.uid, 0))

    def failure(self, lease: Lease) -> str | None:
        """Why it may not run again; None while it may."""
        if lease.uid not in self._deaths:
            return None
        return verdict(self.deaths(lease), self._max_attempts, self._reasons[lease.uid])

    def forget(self, uid: str) -> None:
        """Forget a lease that has ended."""
        self._deaths.pop(uid, None)
        self._reasons.pop(uid, None)

    @property
    def suspects(self) -> int:
        """Leases held in at least one death."""
        return len(self._deaths)

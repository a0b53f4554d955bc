"""Decides when a lease may have a request in the engine, and counts engine deaths by lease. Pure, except for futures.

A *turn* is the right of a lease to have one submission in the engine. Many leases have turns at once. A *suspect* is a
prompt that was in an engine when the engine died (messages/groups.py). After ALONE_FROM deaths a suspect has the engine
alone: it waits until all others are done, and leases that ask later wait for the suspect. Turns are given in the order
of asking, so no lease starves. The samples of a lease that runs alone run together, until all are done or the engine
dies.

Invariants: while a lease runs alone, no other lease is in the engine. Each lease gets a turn once the leases that asked
before are done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from asyncrl.messages.groups import Lease, after_death, runs_alone, verdict


class EngineTurns:
    """The turns in one rollouter's engines, and the deaths of these engines by lease."""

    def __init__(self, max_attempts: int) -> None:
        """A prompt fails after ``max_attempts`` deaths of an engine that it had alone."""
        self._max_attempts = max_attempts
        self._deaths: dict[str, int] = {}
        """Deaths by uid, as Lease.attempt counts them."""
        self._reasons: dict[str, str] = {}
        """Reason of the last death by uid."""
        self.deaths_alone = 0
        """Deaths while a lease ran alone, over all leases."""
        self.failed = 0
        """Number of leases that have failed after such deaths."""
        self._blamed = ""
        """Uid of the lease of the last excused death; "" once a submission has ended normally since."""
        self.excused = False
        """Whether the last death is blamed on a prompt that ran alone, and so does not count against the engine. If
        engines die of different prompts, one after another, and no submission ends normally between, the engine is at
        fault."""
        self._inside: Counter[str] = Counter()
        """Number of submissions in the engine by uid."""
        self._waiting: dict[asyncio.Future[None], Lease] = {}
        """Leases that wait for a turn, in the order of asking."""
        self.lone: str | None = None
        """Uid of the lease that runs alone now."""
        self._ending = False
        """Whether the engine died under the lone lease, so that no further sample of it may enter in this turn."""
        self.lone_turns = 0
        """Number of times that a lease has had the engine alone."""

    # --- turns ---

    async def take(self, lease: Lease) -> None:
        """Wait for a turn of ``lease``; ``give_back`` ends the turn. If cancelled, the lease leaves the queue."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = lease
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
                self._give_turns()
            else:
                # The turn was given just before the cancellation.
                self.give_back(lease)
            raise

    def give_back(self, lease: Lease) -> None:
        """End one turn of a lease."""
        self._inside[lease.uid] -= 1
        if not self._inside[lease.uid]:
            del self._inside[lease.uid]
            if self.lone == lease.uid:
                self.lone, self._ending = None, False
        self._give_turns()

    def _give_turns(self) -> None:
        """Give turns to the leases that wait, in order, up to a suspect that must run alone.

        Such a suspect gets the engine once the engine is empty; then all waiting samples of the suspect enter together.
        """
        while self.lone is None and self._waiting:
            turn, lease = next(iter(self._waiting.items()))
            # Checked only now: the lease may have become suspect while it waited.
            if turn.cancelled() or not runs_alone(self.deaths(lease)):
                self._enter(turn)
            elif self._inside:
                # Running requests are not aborted for the suspect: under on_update = drain a response must have one
                # version. After a death, when leases become suspect, the engine is empty anyway.
                return
            else:
                self.lone = lease.uid
                self.lone_turns += 1
        # After a death under the lone lease, the leases that wait come before its remaining samples.
        if self.lone is not None and not self._ending:
            for turn in [turn for turn, lease in self._waiting.items() if lease.uid == self.lone]:
                self._enter(turn)

    def _enter(self, turn: asyncio.Future[None]) -> None:
        """Take a turn out of the queue, and give it unless it was cancelled."""
        lease = self._waiting.pop(turn)
        # A cancelled task may not have run yet: then its turn is still in the queue.
        if not turn.cancelled():
            self._inside[lease.uid] += 1
            turn.set_result(None)

    # --- deaths ---

    def died(self, inside: Sequence[Lease], reason: str) -> None:
        """Count an engine's death against the leases that were in it (``inside``), and set ``excused``.

        If a lease ran alone, its samples now wait behind the other leases.
        """
        alone = bool(inside) and self.lone is not None
        for lease in inside:
            self._deaths[lease.uid] = after_death(self.deaths(lease), alone=alone)
            self._reasons[lease.uid] = reason
            self.deaths_alone += alone
            self.failed += alone and self.failure(lease) is not None
        self.excused = alone and self._blamed in ("", self.lone)
        if self.excused:
            self._blamed = self.lone or ""
        self._ending = self.lone is not None

    def worked(self) -> None:
        """Note that a submission has ended normally, so the engine works."""
        self._blamed = ""

    def deaths(self, lease: Lease) -> int:
        """Number of deaths counted against the prompt of a lease, those at earlier rollouters included."""
        return max(lease.attempt, self._deaths.get(lease.uid, 0))

    def failure(self, lease: Lease) -> str | None:
        """The reason why a lease may not run again; None while it may."""
        if lease.uid not in self._deaths:
            return None
        return verdict(self.deaths(lease), self._max_attempts, self._reasons[lease.uid])

    def forget(self, uid: str) -> None:
        """Forget a lease that has ended."""
        self._deaths.pop(uid, None)
        self._reasons.pop(uid, None)

    @property
    def suspects(self) -> int:
        """Number of held leases that were in the engine at a death."""
        return len(self._deaths)

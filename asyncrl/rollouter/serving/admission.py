"""Admission of calls to the engine: slots, places of open episodes, and turns. Pure, except for futures.

A *slot* is the right to have one call in the engine; a *place* is the right to have one episode open. There may be more
places than slots. Under ``rollout.concurrency = "auto"`` the number of slots adapts to the engine's load, within
bounds:

- raised while all slots are used, the engine has begun all requests, and the KV cache has room: by the share GROWTH
  until the first cut, and by less later;
- cut to the share CUT under *pressure*: when the engine preempts a request, which then computes its context again, or
  when its KV cache is nearly full. After a cut there is no further one until the running calls are within the limit.

A call in a slot waits for its lease's turn before each submission. A *turn* is the right of a lease to have one
submission in the engine. Many leases have turns at once. A *suspect* is a prompt that was in an engine when the engine
died (core/death_counts.py). After ALONE_FROM deaths a suspect has the engine alone: it waits until all others are done,
and leases that ask later wait for the suspect. Turns are given in the order of asking, so no lease starves. The samples
of a lease that runs alone run together, until all are done or the engine dies.

Invariants: while a lease runs alone, no other lease is in the engine. Each lease gets a turn at the latest once those
that asked before it are done.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from asyncrl.core.death_counts import DeathCounts, runs_alone
from asyncrl.messages.groups import Lease
from asyncrl.rollouter.engines.base import EngineLoad

ROOM, FULL = 0.85, 0.95
"""Shares of the KV cache: below ROOM the limit may grow, from FULL on it is cut."""
GROWTH = 0.25
"""Share of the limit by which each call of ``look`` may raise it before the first cut."""
STEPS = 16
"""Approximate number of calls of ``look`` in which the limit regains what a cut took."""
CUT = 0.8
"""Share of the limit that a cut leaves."""


class Concurrency:
    """The adaptive number of slots, between ``least`` and ``most``; the rules are in the module's docstring."""

    def __init__(self, least: int, most: int, start: int) -> None:
        assert 1 <= least <= most
        self._least, self._most = least, most
        self.limit = min(most, max(least, start))
        """The present number of slots."""
        self.cuts = 0
        """Number of cuts so far."""
        self._settling = False
        """Whether more calls are still running than the last cut allows."""
        self._preemptions = 0
        """``EngineLoad.preemptions`` at the last call."""

    def look(self, load: EngineLoad, *, running: int) -> int:
        """Adapt the limit to the engine's load and return it. ``running`` calls have a slot.

        ``load.preemptions`` counts up; it is lower than before only after the engine was replaced.
        """
        preempted = load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._settling = self._settling and running > self.limit
        if preempted or load.kv_use >= FULL:
            self._cut(running)
        elif load.kv_use < ROOM and not load.queued and running >= self.limit:
            share = GROWTH if not self.cuts else (1 - CUT) / STEPS
            self.limit = min(self._most, self.limit + max(1, int(share * self.limit)))
        return self.limit

    def engine_reloaded(self, load: EngineLoad) -> None:
        """Ignore the preemptions since the last ``look``: recomputing keys and values after a load is no pressure."""
        self._preemptions = load.preemptions

    def _cut(self, running: int) -> None:
        """Cut the limit, unless the calls that run have not come down to the last cut yet."""
        if self._settling:
            return
        # Cut from the slots in use: unused ones did not cause the pressure.
        self.limit = max(self._least, int(CUT * min(self.limit, max(1, running))))
        self.cuts += 1
        self._settling = running > self.limit


class Slots:
    """A semaphore of adjustable size whose slots are numbered; a taker gets the lowest free number.

    Invariant: a number belongs to one taker until it is given back; waiters come in the order of asking. If ``resize``
    leaves fewer slots than are taken, their takers keep them, and waiters wait until enough are given back.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        """Number of slots in use."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        """One future for each waiting taker, in the order of asking."""
        self._returned: list[int] = []
        """Heap of the numbers that were given back."""
        self._unused = 0
        """The lowest number that was never given out."""

    def resize(self, size: int) -> None:
        """Set the number of slots, and admit waiters if there are more now."""
        self.size = size
        self._admit()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """Wait for a free slot and hold it inside the ``async with``; yields its number."""
        await self._enter()
        number = self._take_number()
        try:
            yield number
        finally:
            heapq.heappush(self._returned, number)
            self._leave()

    def _take_number(self) -> int:
        """Return the lowest free number; those that were given back are lower than all unused ones."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._unused += 1
        return self._unused - 1

    async def _enter(self) -> None:
        """Take a free slot, or wait in the queue for one. A cancelled caller leaves the queue, and keeps no slot."""
        if self.taken < self.size and not self._waiters:
            self.taken += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # ``_admit`` skips a cancelled waiter, and may have removed it already.
                with suppress(ValueError):
                    self._waiters.remove(waiter)
            else:
                # ``_admit`` gave the caller a slot just before the cancellation.
                self._leave()
            raise

    def _leave(self) -> None:
        self.taken -= 1
        self._admit()

    def _admit(self) -> None:
        """Give the free slots to waiters, in the order of asking."""
        while self._waiters and self.taken < self.size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.taken += 1
                waiter.set_result(None)


class EngineTurns:
    """The turns in one rollouter's engines, and the deaths of these engines by lease."""

    def __init__(self, max_attempts: int) -> None:
        """A prompt fails after ``max_attempts`` deaths of an engine that it had alone."""
        self._deaths = DeathCounts(max_attempts=max_attempts)
        """Deaths by uid of the leases that were in the engine at a death; those at earlier rollouters included."""
        self.deaths_alone = 0
        """Deaths while a lease ran alone, over all leases."""
        self.failed = 0
        """Number of leases that failed for good, because engines died too often while they ran alone."""
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
            self._deaths.raise_to(lease.uid, lease.attempt)
            self._deaths.died(lease.uid, alone=alone, reason=reason)
            self.deaths_alone += alone
            self.failed += alone and self.failure(lease) is not None
        self.excused = alone and self._blamed in ("", self.lone)
        if self.excused:
            self._blamed = self.lone or ""
        self._ending = self.lone is not None

    def clear_blame(self) -> None:
        """Note that a submission has ended normally: the engine works, so no lease is blamed for its last death."""
        self._blamed = ""

    def deaths(self, lease: Lease) -> int:
        """Number of deaths counted against the prompt of a lease, those at earlier rollouters included."""
        return max(lease.attempt, self._deaths.number(lease.uid))

    def failure(self, lease: Lease) -> str | None:
        """The reason why a lease may not run again; None while it may."""
        return self._deaths.verdict(lease.uid)

    def forget(self, uid: str) -> None:
        """Forget a lease that has ended."""
        self._deaths.forget(uid)

    @property
    def suspects(self) -> int:
        """Number of held leases that were in the engine at a death."""
        return len(self._deaths)

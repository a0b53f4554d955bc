"""Slots of the engine and places of open episodes, and how many of them there are.

A slot is the right to have one call in the engine; a place is the right to have one episode open. There may be more
places than slots. Under ``rollout.concurrency = "auto"`` the number of slots adapts to the engine's load, within
bounds:

- raised while all slots are used and the KV cache has room: by the share GROWTH until the first cut, and by less later;
- cut to the share CUT under *pressure*: when the engine preempts a request, which then computes its context again, or
  when its KV cache is nearly full. After a cut there is no further one until the running calls are within the limit.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from asyncrl.rollouter.engines.base import EngineLoad

ROOM, FULL = 0.85, 0.95
"""Shares of the KV cache: below ROOM the limit may grow, from FULL on it is cut."""
GROWTH = 0.25
"""Share of the limit by which it grows before the first cut."""
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
        self.cuts = 0
        self._settling = False
        """Whether more calls are still running than the last cut allows."""
        self._preemptions = 0

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
        self._waiters: deque[asyncio.Future[None]] = deque()
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

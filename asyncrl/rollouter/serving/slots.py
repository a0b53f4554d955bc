"""Slots of the engine and places of open episodes, and how many of them there are.

Slots are places in the engine for calls. Places are those of open episodes; several may share a slot. Under
``rollout.concurrency = "auto"`` the limit of slots is raised while all slots are used and the engine has room: first by
a share of itself, and from the first cut on by a constant. It is cut by a share where the engine preempts a request,
which then computes its context again, or where its KV cache is nearly full. After a cut the same pressure cuts nothing
more: not before the calls that run are within the limit. The limit stays within its bounds, is raised by no more than
GROWTH at a time, and only a look that sees pressure cuts it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from asyncrl.rollouter.engines.base import EngineLoad

ROOM, FULL = 0.85, 0.95
"""Shares of the KV cache: below the first there is room for more, from the second on it is as good as full."""
GROWTH = 0.25
"""Share by which it grows before its first cut."""
STEPS = 16
"""Looks, about, in which the limit regains from one cut to the next what was cut."""
CUT = 0.8
"""Share of the limit that a cut leaves."""


class Concurrency:
    """The limit, between ``least`` and ``most``."""

    def __init__(self, least: int, most: int, start: int) -> None:
        assert 1 <= least <= most
        self._least, self._most = least, most
        self.limit = min(most, max(least, start))
        self.cuts = 0
        self._settling = False
        """Whether it was cut, and more calls are still running than are allowed."""
        self._preemptions = 0

    def look(self, load: EngineLoad, *, running: int) -> int:
        """The limit from now on. ``running`` calls have a slot.

        ``load.preemptions`` counts up; where it has become less, the engine is another.
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
        """Take its count of preemptions: recomputing keys and values under new weights is no pressure."""
        self._preemptions = load.preemptions

    def _cut(self, running: int) -> None:
        if self._settling:
            return
        # Slots that were not used say nothing of what the cache bears.
        self.limit = max(self._least, int(CUT * min(self.limit, max(1, running))))
        self.cuts += 1
        self._settling = running > self.limit


class Slots:
    """Places of things that run at a time, numbered so that the lowest free one is taken; ``resize`` changes ``size``.

    Invariant: a number belongs to one taker until it is given back; waiters come in the order of asking. Where there
    are fewer slots than are taken, those that have one keep it, and no other comes before enough are given back.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._returned: list[int] = []
        self._unused = 0
        """Number from which on none has been given out."""

    def resize(self, size: int) -> None:
        """Have ``size`` of them from now on."""
        self.size = size
        self._admit()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """Wait for a free slot and hold it; gives its number."""
        await self._enter()
        number = self._number()
        try:
            yield number
        finally:
            heapq.heappush(self._returned, number)
            self._leave()

    def _number(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._unused += 1
        return self._unused - 1

    async def _enter(self) -> None:
        if self.taken < self.size and not self._waiters:
            self.taken += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # ``_admit`` may have taken it out already.
                with suppress(ValueError):
                    self._waiters.remove(waiter)
            else:
                # It was given one in the same moment.
                self._leave()
            raise

    def _leave(self) -> None:
        self.taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self.taken < self.size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.taken += 1
                waiter.set_result(None)

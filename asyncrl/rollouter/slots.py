"""The slots of a rollouter: places of things that run at a time, numbered so that the lowest free one is taken.

Invariant: a number is nobody else's until it is given back; waiters come in the order of asking. Where there are
fewer slots than are taken, those that have one keep it, and nobody else comes before enough are given back.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Slots:
    """Slots, ``size`` of them, which may change at any time by ``resize``."""

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

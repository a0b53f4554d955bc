"""The slots of a rollouter: places of the episodes that run at a time, numbered so that the lowest free one is taken.

Invariant: a number is nobody else's until it is given back.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """``count`` of them."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._semaphore = asyncio.Semaphore(count)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """Wait for a free slot and hold it; gives its number."""
        async with self._semaphore:
            number = heapq.heappop(self._free)
            try:
                yield number
            finally:
                heapq.heappush(self._free, number)

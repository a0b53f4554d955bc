"""Parked calls: wait until a question has an answer, asked again at each event instead of being polled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ParkingLot:
    """Calls that wait for the same kind of event. First come, first asked."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def wake(self) -> None:
        """Something has happened: every parked call asks again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def until(self, ask: Callable[[], T | None], timeout: float) -> T | None:
        """The first answer that is not None; None when ``timeout`` seconds are over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (answer := ask()) is None:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[future] = None
            timer = loop.call_at(deadline, _expire, future)
            try:
                await future
            finally:
                timer.cancel()
                self._waiting.pop(future, None)
            if loop.time() >= deadline:
                return ask()
        return answer


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

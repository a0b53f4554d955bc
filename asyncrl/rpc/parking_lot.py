"""Parked calls: handlers that wait until they have an answer.

A parked call evaluates its ``ask`` function once more after each event, instead of polling. Invariant: each call that
is parked at an event asks again after it. At most AT_ONCE calls ask in one turn of the event loop, so that a thousand
parked calls delay nothing else. Never fails by itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 64
"""Calls that ask again in one turn of the event loop."""


class ParkingLot:
    """Calls that wait for the same kind of event. First come, first asked."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Calls that wait for the next ``wake``."""
        self._due: dict[asyncio.Future[None], None] = {}
        """Calls that will ask again in this turn of the event loop or the next ones."""

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waiting) + len(self._due)

    def wake(self) -> None:
        """Let every parked call ask again."""
        was_due = bool(self._due)
        self._due.update(self._waiting)
        self._waiting.clear()
        # If calls were due before, ``_wake_due`` is scheduled already.
        if not was_due:
            self._wake_due()

    def _wake_due(self) -> None:
        for future in list(itertools.islice(self._due, AT_ONCE)):
            del self._due[future]
            if not future.done():
                future.set_result(None)
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_due)

    async def until(self, ask: Callable[[], T | None], timeout: float) -> T | None:
        """Returns the first answer of ``ask`` that is not None. It asks at once, and again after each ``wake``.

        After ``timeout`` seconds it asks once more and returns that answer, which may be None.
        """
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
                self._due.pop(future, None)
            if loop.time() >= deadline:
                return ask()
        return answer


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

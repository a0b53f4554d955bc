"""Many deadlines on one timer.

A timer of the event loop for each call would be most of the cost of its deadline, and nearly every call is over long
before. Here deadlines fall into ticks. An item that is over is removed from its tick, and one timer waits for the
earliest tick that is not empty.

Invariant: each item that is not removed is passed to ``expire`` once, at most TICK_S late, and no earlier than a timer
of the loop may be. This also holds if ``expire`` raises for another item: the error reaches the loop's exception
handler after all due items have expired and the timer is set again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

TICK_S = 0.01
EARLY_TICKS = 0.06
"""Ticks by which a timer may come early: uvloop rounds its timers to milliseconds."""


class Deadlines(Generic[T]):
    """Deadlines on the loop's clock. ``add`` gives the tick that ``remove`` takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[T], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._ticks: dict[int, dict[T, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed: float = math.inf
        """The tick that the timer waits for."""

    def add(self, item: T, when: float) -> int:
        """Have ``item`` expire at ``when`` (s)."""
        # Rounded up: nothing expires before its time.
        tick = int(when / TICK_S) + 1
        items = self._ticks.get(tick)
        if items is None:
            items = self._ticks[tick] = {}
            if tick < self._armed:
                self._arm(tick)
        items[item] = None
        return tick

    def remove(self, item: T, tick: int) -> None:
        """An item is over, or has expired."""
        items = self._ticks.get(tick)
        if items is not None:
            items.pop(item, None)
            # The timer stays set and may find nothing; ``_run`` then sets it for the earliest tick that is left.
            if not items:
                del self._ticks[tick]

    def close(self) -> None:
        """Nothing expires any more."""
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = tick
        self._timer = self._loop.call_at(tick * TICK_S, self._run)

    def _run(self) -> None:
        self._timer, self._armed = None, math.inf
        now = self._loop.time() / TICK_S
        errors = []
        for tick in sorted(tick for tick in self._ticks if tick <= now + EARLY_TICKS):
            # An item that expires may have removed the last one of a later tick.
            for item in self._ticks.pop(tick, ()):
                try:
                    self._expire(item)
                except Exception as error:
                    errors.append(error)
        # An item that has expired may have added a later one, and have armed the timer for that.
        if self._ticks and (earliest := min(self._ticks)) < self._armed:
            self._arm(earliest)
        if errors:
            raise ExceptionGroup("deadlines that could not expire", errors)

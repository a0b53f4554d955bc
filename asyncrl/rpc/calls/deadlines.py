"""Many deadlines on one timer.

Nearly every call ends long before its deadline, and a timer of the event loop for each call would be costly. Here
deadlines are rounded up to *ticks* of TICK_S. An item that is over is removed from its tick. One timer waits for the
earliest tick that is not empty.

Invariant: each item that is not removed is passed to ``expire`` once. This happens no earlier than a timer of the loop
may fire for the item, and at most TICK_S later. An error of ``expire`` for one item does not stop the others. It
reaches the loop's exception handler after all due items have expired and the timer is set again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

TICK_S = 0.01
EARLY_TICKS = 0.06
"""Ticks by which the timer may fire early: uvloop rounds its timers to milliseconds."""


class Deadlines(Generic[T]):
    """Deadlines on the loop's clock. ``add`` returns the tick that ``remove`` takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[T], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._ticks: dict[int, dict[T, None]] = {}
        """Items by tick."""
        self._timer: asyncio.TimerHandle | None = None
        self._armed_tick: float = math.inf
        """Tick at which the newest timer fires; infinite before the first and once it has fired."""

    def add(self, item: T, when: float) -> int:
        """Have ``item`` expire at ``when`` (s). Returns its tick."""
        # Rounded up, so that nothing expires early.
        tick = int(when / TICK_S) + 1
        items = self._ticks.get(tick)
        if items is None:
            items = self._ticks[tick] = {}
            if tick < self._armed_tick:
                self._arm(tick)
        items[item] = None
        return tick

    def remove(self, item: T, tick: int) -> None:
        """Remove an item that is over; does nothing if it has expired."""
        items = self._ticks.get(tick)
        if items is not None:
            items.pop(item, None)
            # The timer stays set and may find nothing; ``_run`` then sets it for the earliest tick that is left.
            if not items:
                del self._ticks[tick]

    def close(self) -> None:
        """Remove all items and stop the timer."""
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_tick = tick
        self._timer = self._loop.call_at(tick * TICK_S, self._run)

    def _run(self) -> None:
        """Expire the items of all ticks that are due, and set the timer for the earliest tick that is left."""
        self._timer, self._armed_tick = None, math.inf
        now = self._loop.time() / TICK_S
        errors = []
        for tick in sorted(tick for tick in self._ticks if tick <= now + EARLY_TICKS):
            # ``expire`` may have removed the last item of a later tick, so a tick may be missing.
            for item in self._ticks.pop(tick, ()):
                try:
                    self._expire(item)
                except Exception as error:
                    errors.append(error)
        # ``expire`` may have added an item, and thus have set the timer already.
        if self._ticks and (earliest := min(self._ticks)) < self._armed_tick:
            self._arm(earliest)
        if errors:
            raise ExceptionGroup("deadlines that could not expire", errors)

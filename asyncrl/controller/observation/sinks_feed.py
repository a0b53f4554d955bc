"""The controller's end of the sinks: a bounded queue of lines and the newest snapshot, which their actor asks for.

``line`` and ``picture`` never wait. A line is kept until a request shows that it was taken, so that one that the sinks
have not got is told to those that are started after them; one that finds no room is dropped and counted. Lines are
numbered on from ``above``, which is above all numbers of an earlier controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from itertools import islice
from typing import Any

from asyncrl.messages.monitor import Metrics, WatchMetrics
from asyncrl.runtime.calls.handlers import Caller
from asyncrl.runtime.parking import ParkingLot
from asyncrl.telemetry.metrics_line import room_for

DROPPED, RESTARTS = "sinks/dropped", "sinks/restarts"
ROOM = 4000
AT_ONCE = 100
"""Most lines of one answer."""


class SinksFeed:
    """The things that wait for the sinks; nothing does where none is ``wanted``. ``counters`` gets the counts."""

    def __init__(self, counters: MutableMapping[str, float], above: int, *, wanted: bool) -> None:
        self._wanted = wanted
        self._counters = counters
        self._lines: deque[dict[str, Any]] = deque()
        self._last = above
        """Number of the newest line."""
        self._snapshot, self._picture = b"", above
        self._is_over = False
        self._asker = 0
        """Newest incarnation of the sinks that has asked."""
        self._askers = ParkingLot()
        if wanted:
            counters[DROPPED] = counters[RESTARTS] = 0

    def line(self, line: dict[str, Any]) -> None:
        """Hand over a line of metrics.jsonl, which nobody changes any more."""
        if not self._wanted:
            return
        if self._is_over or len(self._lines) >= room_for(line, ROOM):
            self._counters[DROPPED] += 1
            return
        self._lines.append(line)
        self._last += 1
        self._askers.wake()

    def picture(self, snapshot: bytes) -> None:
        """Hand over a snapshot, encoded, in place of the one before."""
        self._snapshot, self._picture = snapshot, self._picture + 1
        self._askers.wake()

    def end(self) -> None:
        """Nothing more will come: the sinks are to end."""
        self._is_over = True
        self._askers.wake()

    def close(self) -> None:
        """Count what nobody has taken."""
        if self._lines:
            self._counters[DROPPED] += len(self._lines)
            self._lines.clear()

    async def watch(self, request: WatchMetrics, caller: Caller) -> Metrics:
        """Answer the sinks, once there is something that they have not seen or their time is over."""
        if caller.incarnation > self._asker:
            self._counters[RESTARTS] += self._asker > 0
            self._asker = caller.incarnation
        # None for a number that an earlier controller gave, which is below all here: the range is empty.
        for _ in range(min(len(self._lines), request.line - (self._last - len(self._lines)))):
            self._lines.popleft()

        def news() -> Metrics | None:
            is_new = self._picture != request.picture and bool(self._snapshot)
            return self._answer(is_new) if self._lines or is_new or self._is_over else None

        return await self._askers.until(news, caller.park_s) or self._answer(is_new=False)

    def _answer(self, is_new: bool) -> Metrics:
        lines = list(islice(self._lines, AT_ONCE))
        left = len(self._lines) - len(lines)
        return Metrics(
            lines=lines,
            line=self._last - left,
            picture=self._picture,
            snapshot=self._snapshot if is_new else b"",
            # Not before the sinks have shown that they took them all.
            last=self._is_over and not lines,
        )

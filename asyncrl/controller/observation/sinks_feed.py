"""Feeds the sinks actor from the controller: a bounded queue of metrics lines, and the newest snapshot.

The sinks actor asks for both. ``line`` and ``snapshot`` never wait. A line stays until a request shows that the sinks
have it, so restarted sinks get it again. A line without room is dropped and counted. Numbers begin above ``above``, so
no earlier controller used them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from itertools import islice
from typing import Any

from asyncrl.messages.monitor import Metrics, WatchMetrics
from asyncrl.observe.metrics_line import room_for
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.parking_lot import ParkingLot

DROPPED, RESTARTS = "sinks/dropped", "sinks/restarts"
ROOM = 4000
"""Most lines that are queued. Lines of weight updates may fill only half of it (``room_for``)."""
AT_ONCE = 100
"""Most lines of one answer."""


class SinksFeed:
    """The lines and the snapshot for the sinks. Unless ``wanted``, lines are ignored. Counts go to ``counters``."""

    def __init__(self, counters: MutableMapping[str, float], above: int, *, wanted: bool) -> None:
        self._wanted = wanted
        self._counters = counters
        self._lines: deque[dict[str, Any]] = deque()
        """Lines that the sinks have not confirmed, the oldest first."""
        self._last = above
        """Number of the newest line."""
        self._snapshot, self._snapshot_number = b"", above
        self._is_over = False
        """Whether no more lines are accepted."""
        self._asker_incarnation = 0
        """Newest incarnation of the sinks that has asked."""
        self._askers = ParkingLot()
        """WatchMetrics calls of the sinks, which wait for lines or a snapshot."""
        if wanted:
            counters[DROPPED] = counters[RESTARTS] = 0

    def line(self, line: dict[str, Any]) -> None:
        """Queue a line of metrics.jsonl. The caller must not change it afterwards."""
        if not self._wanted:
            return
        if self._is_over or len(self._lines) >= room_for(line, ROOM):
            self._counters[DROPPED] += 1
            return
        self._lines.append(line)
        self._last += 1
        self._askers.wake()

    def snapshot(self, snapshot: bytes) -> None:
        """Replace the encoded snapshot."""
        self._snapshot, self._snapshot_number = snapshot, self._snapshot_number + 1
        self._askers.wake()

    def end(self) -> None:
        """Accept no more lines; the sinks end once they have all lines."""
        self._is_over = True
        self._askers.wake()

    def close(self) -> None:
        """Count the lines that the sinks did not take."""
        if self._lines:
            self._counters[DROPPED] += len(self._lines)
            self._lines.clear()

    @handler
    async def watch(self, request: WatchMetrics, caller: Caller) -> Metrics:
        """Drop the lines that the sinks confirm, then park until there are lines, a new snapshot, or the end.

        Counts a restart if a newer incarnation of the sinks asks.
        """
        if caller.incarnation > self._asker_incarnation:
            self._counters[RESTARTS] += self._asker_incarnation > 0
            self._asker_incarnation = caller.incarnation
        # Number of the line before the oldest one that is queued.
        number_before = self._last - len(self._lines)
        # A number from an earlier controller is smaller than all numbers here, so the range is empty.
        for _ in range(min(len(self._lines), request.line - number_before)):
            self._lines.popleft()

        def news() -> Metrics | None:
            is_new = self._snapshot_number != request.snapshot_number and bool(self._snapshot)
            return self._answer(is_new) if self._lines or is_new or self._is_over else None

        return await self._askers.until(news, caller.park_s) or self._answer(is_new=False)

    def _answer(self, is_new: bool) -> Metrics:
        """Make an answer of the oldest AT_ONCE lines, with the snapshot if that is new to the sinks."""
        lines = list(islice(self._lines, AT_ONCE))
        left = len(self._lines) - len(lines)
        return Metrics(
            lines=lines,
            line=self._last - left,
            snapshot_number=self._snapshot_number,
            snapshot=self._snapshot if is_new else b"",
            # Only after the sinks have confirmed all lines.
            last=self._is_over and not lines,
        )

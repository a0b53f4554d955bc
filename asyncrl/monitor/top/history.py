"""The snapshots that rates, shares and the verdict are taken from. Pure.

Rates are those of the last RATES_S. Shares are taken over a few steps, or they would show the phase of a step and not
who waits on whom. Snapshots are thinned: about KEPT are held.
"""

from __future__ import annotations

from collections import deque

from asyncrl.monitor.metrics_file import number_in
from asyncrl.monitor.rates import Interval, median
from asyncrl.snapshot import Snapshot

RATES_S = 10.0
STEPS = 4
SHORTEST_S = 10.0
LONGEST_S = 600.0
KEPT = 120


class History:
    """The newest snapshots of one run, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Take a snapshot. One that is not newer, or of another run or attempt, begins anew."""
        if self._kept:
            last = self._kept[-1]
            same = (last.run.run_id, last.run.attempt) == (snapshot.run.run_id, snapshot.run.attempt)
            if not same or snapshot.wall <= last.wall:
                self._kept.clear()
        window = self.window_s(snapshot)
        # The last two may lie closer together: rates want recent ones, shares long ones.
        if len(self._kept) >= 3 and self._kept[-1].wall - self._kept[-3].wall < 2 * window / KEPT:
            del self._kept[-2]
        self._kept.append(snapshot)
        while len(self._kept) > 2 and self._kept[1].wall <= snapshot.wall - window:
            self._kept.popleft()

    @staticmethod
    def window_s(snapshot: Snapshot) -> float:
        """Seconds that shares are taken over: a few steps."""
        step_s = median(number_in(line, "time/step_s") for line in snapshot.train[-STEPS:])
        return min(LONGEST_S, max(SHORTEST_S, STEPS * (step_s or 0.0)))

    @property
    def newest(self) -> Snapshot | None:
        """None before the first."""
        return self._kept[-1] if self._kept else None

    def recent(self) -> Interval:
        """For rates."""
        return self._since(RATES_S)

    def steps(self) -> Interval | None:
        """For shares; None when there is one snapshot alone."""
        return self._since(self.window_s(self._kept[-1])) if len(self._kept) > 1 else None

    def _since(self, seconds: float) -> Interval:
        newest = self._kept[-1]
        older = next((each for each in reversed(self._kept) if each.wall <= newest.wall - seconds), self._kept[0])
        return Interval(older, newest)

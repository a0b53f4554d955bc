"""The snapshots that rates, shares and the verdict are taken from. Pure.

Rates are those of the last RATES_S. Shares are taken over a few steps, or they would show the phase of a step and not
who waits on whom; once a learner has trained a step, not over the time before that, in which all others wait for the
start. Snapshots are thinned: about KEPT are held.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from asyncrl.monitor.metrics_line import number_in
from asyncrl.monitor.rates import Interval, median
from asyncrl.monitor.top.levels import Levels, levels_of
from asyncrl.snapshot import Snapshot

RATES_S = 10.0
STEPS = 4
SHORTEST_S = 20.0
LONGEST_S = 600.0
KEPT = 120


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot with its levels."""

    snapshot: Snapshot
    levels: Levels

    @property
    def wall(self) -> float:
        """Unix time (s)."""
        return self.snapshot.wall

    @property
    def learner(self) -> object:
        """Start of the learner that trained the newest step; None before the first step."""
        return self.snapshot.train[-1].get("start", 0) if self.snapshot.train else None


class History:
    """The newest snapshots of one run, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Moment] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Take a snapshot. One of the same moment as the newest replaces it; one that is older, or of another run or
        attempt, begins anew."""
        if self._kept:
            last = self._kept[-1].snapshot
            same = (last.run.run_id, last.run.attempt) == (snapshot.run.run_id, snapshot.run.attempt)
            if not same or snapshot.wall < last.wall:
                self._kept.clear()
            elif snapshot.wall == last.wall:
                self._kept.pop()
        window = self.window_s(snapshot)
        # The last two may lie closer together: rates want recent ones, shares long ones.
        if len(self._kept) >= 3 and self._kept[-1].wall - self._kept[-3].wall < 2 * window / KEPT:
            del self._kept[-2]
        self._kept.append(Moment(snapshot, levels_of(snapshot)))
        while len(self._kept) > 2 and self._kept[1].wall <= snapshot.wall - window:
            self._kept.popleft()

    @staticmethod
    def window_s(snapshot: Snapshot) -> float:
        """Seconds that shares are taken over: a few steps, and whole ones, so that these are seen evenly."""
        step_s = median(number_in(line, "time/step_s") for line in snapshot.train[-STEPS:])
        if step_s is None or step_s <= 0.0:
            return SHORTEST_S
        return min(LONGEST_S, step_s * max(STEPS, math.ceil(SHORTEST_S / step_s)))

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._kept[-1].snapshot if self._kept else None

    def recent(self) -> Interval:
        """Interval for rates."""
        return self._since(RATES_S)

    def steps(self) -> Interval | None:
        """Interval for shares; None when there is one snapshot alone."""
        window = self.window()
        return Interval(window[0].snapshot, window[-1].snapshot) if len(window) > 1 else None

    def window(self) -> list[Moment]:
        """The moments from one end of ``steps`` to the other, oldest first; there must be one."""
        found = self._back(self.window_s(self._kept[-1].snapshot))
        stepping = self._stepping(found)
        return stepping if len(stepping) > 1 else found

    def stepping_s(self) -> float:
        """Seconds of ``window`` in which the present learner has trained steps; all of it before the first."""
        stepping = self._stepping(self.window())
        return stepping[-1].wall - stepping[0].wall

    @staticmethod
    def _stepping(moments: list[Moment]) -> list[Moment]:
        return [each for each in moments if each.learner == moments[-1].learner]

    def _since(self, seconds: float) -> Interval:
        return Interval(self._back(seconds)[0].snapshot, self._kept[-1].snapshot)

    def _back(self, seconds: float) -> list[Moment]:
        """The newest moment, and those before it up to the first that is older by so much."""
        found: list[Moment] = []
        for each in reversed(self._kept):
            found.append(each)
            if each.wall <= self._kept[-1].wall - seconds:
                break
        return found[::-1]

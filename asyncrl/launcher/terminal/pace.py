"""The time that a run has taken and is likely to take, by the times at which its steps were heard of. Pure.

The time left is the mean time of the last STEPS steps of this launcher's run, times the steps that are left: a start
that took long counts in no step. The mean starts again when a learner goes back to a checkpoint.
"""

from __future__ import annotations

from collections import deque

STEPS = 20


class RunPace:
    """The pace of a run. ``steps`` is its last step, ``began`` the time at which it was started (s, monotonic)."""

    def __init__(self, steps: int, began: float) -> None:
        self._steps, self._began = steps, began
        self._heard: deque[tuple[int, float]] = deque(maxlen=STEPS + 1)

    def heard(self, step: int, now: float) -> None:
        """``step`` was trained at ``now``."""
        if self._heard and step <= self._heard[-1][0]:
            self._heard.clear()
        self._heard.append((step, now))

    def describe(self, now: float) -> str:
        """Elapsed and remaining time in a few words; the latter only where it is known."""
        words = f"elapsed {clock_words(now - self._began)}"
        if len(self._heard) < 2:
            return words
        (first, since), (last, until) = self._heard[0], self._heard[-1]
        left = max(0, self._steps - last) * (until - since) / (last - first)
        return f"{words}  left {clock_words(left)}" if last < self._steps else words


def clock_words(seconds: float) -> str:
    """A time as M:SS, H:MM:SS, or, from a day on, D d HH:MM."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24:02}:{minutes % 60:02}"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"

"""The pauses before an unanswered message is asked after again: exponential backoff with full jitter. Pure.

Invariant: the pause after the n-th time is above 0 and at most ``first_s`` doubled n times, DOUBLINGS times at most,
and spread evenly below that, so that those who wait on the same peer do not ask at the same moment. The draw comes
from the caller's own source, which is seeded: the same caller asks at the same times.

It cannot fail.
"""

from __future__ import annotations

DOUBLINGS = 3


def pause(first_s: float, times: int, draw: float) -> float:
    """Seconds until the next time, after ``times`` before it; ``draw`` is from [0, 1)."""
    return first_s * 2.0 ** min(times, DOUBLINGS) * (1.0 - draw)

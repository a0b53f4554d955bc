"""Pauses before something that failed is tried again: each twice as long as the one before, up to a longest. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

LONGEST_S = 60.0
MOST_DOUBLINGS = 64
"""Bound of the exponent: a float takes so many of any seconds, and they are longer than any longest."""


def backoff(first_s: float, times: int, longest_s: float = LONGEST_S) -> float:
    """Seconds until the next try, after ``times`` pauses before this one; a first pause above ``longest_s`` stays."""
    return min(first_s * 2.0 ** min(times, MOST_DOUBLINGS), max(first_s, longest_s))


def backoffs(first_s: float, longest_s: float = LONGEST_S) -> Iterator[float]:
    """All pauses, from the first on."""
    return (backoff(first_s, times, longest_s) for times in count())

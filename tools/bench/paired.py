"""Paired measurements on a noisy machine: order, medians and their intervals. Pure, but for the clock of the sides.

The two sides of a comparison are measured in pairs, one right after the other, in alternating order, so that what
disturbs the machine disturbs both, and neither gains from coming second. The figure is the median of the pairs'
ratios, with a percentile bootstrap interval. Comparing a side with itself in the same way (A/A) shows whether the
procedure is fair: the interval must hold 1. Before each measurement there is a short rest, so that what the other side
has left to do in the background is not done at the expense of this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

REST_S = 0.05
RESAMPLES = 10_000
LEVEL = 0.95

Side = Callable[[], Awaitable[float]]
"""Measures once and returns the figure."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, or another statistic, and its bootstrap interval."""

    median: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides measured in pairs; ``ratio`` is first over second."""

    first: Interval
    second: Interval
    ratio: Interval
    pairs: int


def interval(statistic: Callable[..., Any], *samples: Sequence[float]) -> Interval:
    """A statistic with its percentile bootstrap interval at LEVEL. The same samples give the same interval.

    ``statistic`` takes an array for each sample and reduces their last axes.
    """
    data = [np.asarray(sample, np.float64) for sample in samples]
    if not all(len(each) and np.all(np.isfinite(each)) for each in data):
        raise ValueError(f"no median of {[len(each) for each in data]} values that are not all finite numbers")
    chance = np.random.default_rng(0)
    drawn = [each[chance.integers(0, len(each), (RESAMPLES, len(each)))] for each in data]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(statistic(*drawn), [tail, 1 - tail])
    return Interval(float(statistic(*data)), float(low), float(high))


def median_interval(values: Sequence[float]) -> Interval:
    return interval(partial(np.median, axis=-1), values)


def ratio_of_means(first: Sequence[float], second: Sequence[float]) -> Interval:
    return interval(lambda a, b: a.mean(-1) / b.mean(-1), first, second)


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Medians of both sides, and of the pairs' ratios."""
    return Comparison(
        first=median_interval([first for first, _ in pairs]),
        second=median_interval([second for _, second in pairs]),
        ratio=median_interval([first / second for first, second in pairs]),
        pairs=len(pairs),
    )


async def measure_pairs(first: Side, second: Side, pairs: int) -> list[tuple[float, float]]:
    """Measure both sides ``pairs`` times, after one warm-up each: first-second, second-first, first-second ..."""
    await first()
    await second()
    found = []
    for number in range(pairs):
        figures: dict[bool, float] = {}
        for is_second in (False, True) if number % 2 == 0 else (True, False):
            await asyncio.sleep(REST_S)
            figures[is_second] = await (second if is_second else first)()
        found.append((figures[False], figures[True]))
    return found

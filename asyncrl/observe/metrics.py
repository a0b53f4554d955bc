"""The metrics of one actor: counters and gauges by name, and histograms with fixed buckets.

Invariant: a name that is not declared (catalogue.py) raises AssertionError if ``strict`` is set, as in the tests;
otherwise it counts like any other. A histogram must always be declared, because the declaration has its buckets: else
it raises KeyError. Other threads may read.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from asyncrl.messages.monitor import Histogram
from asyncrl.observe.catalogue import edges_of, find

STRICT_VARIABLE = "ASYNCRL_STRICT_METRICS"
strict = bool(os.environ.get(STRICT_VARIABLE))
"""Whether each name must be declared."""


def check_name(name: str, kind: str = "") -> None:
    """If ``strict`` is set, raise AssertionError for a name that is not declared, or not as this ``kind``."""
    if strict:
        metric = find(name)
        assert metric is not None, f"{name} is not declared (metrics.py of the actor's folder)"
        assert not kind or kind in metric.kinds, f"{name} is declared as {metric.kinds} and not as {kind}"


class Counters(dict[str, float]):
    """Counters and gauges of an actor by their names."""

    def __setitem__(self, name: str, value: float) -> None:
        if name not in self:
            check_name(name)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: float = 0.0) -> float:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **named: float) -> None:
        values = dict(*others, **named)
        for name in values.keys() - self.keys():
            check_name(name)
        super().update(values)

    def add(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self[name] = self.get(name, 0) + by


class Histograms:
    """Histograms of an actor by their names."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._edges: dict[str, tuple[float, ...]] = {}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times, in the first bucket whose upper edge is not below it."""
        counts = self._counts.get(name)
        if counts is None:
            counts = self._begin(name)
        counts[bisect_left(self._edges[name], value)] += times
        self._sums[name] += value * times

    def observe_all(self, name: str, values: Iterable[float]) -> None:
        """Count each value."""
        for value in values:
            self.observe(name, value)

    def taken(self) -> dict[str, Histogram]:
        """The histograms that have counted a value."""
        return {name: Histogram(list(counts), self._sums[name]) for name, counts in list(self._counts.items())}

    def _begin(self, name: str) -> list[int]:
        check_name(name, "histogram")
        # Set the sum before the counts, because another thread reads the sum of each histogram that has counts.
        self._sums[name], self._edges[name] = 0.0, edges_of(name)
        counts = self._counts[name] = [0] * (len(self._edges[name]) + 1)
        return counts

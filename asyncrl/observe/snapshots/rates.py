"""Changes between two snapshots: rates of counters, shares of states. Pure.

The metrics of an actor are as old as its last heartbeat, so a rate divides by the time between two heartbeats.
Invariant: an unknown rate or share is missing, never 0. A rate is unknown without a value, without a heartbeat between
the snapshots, and after a restart of the actor. Shares leave out a resource whose times inside the interval are unknown
(``seconds_by_state``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from asyncrl.messages.monitor import ActorView, Histogram, Resource, Snapshot

Shares = dict[str, float]
"""Shares by state, 0 to 1; they add up to 1."""


class Interval:
    """Two snapshots of one run. Without an older one there are no rates, and shares cover the time since the start."""

    def __init__(self, older: Snapshot | None, newer: Snapshot) -> None:
        # By the age of the run, because the Unix clock may be set.
        self.seconds = 0.0 if older is None else max(0.0, newer.run.age_s - older.run.age_s)
        self._older = {} if older is None else {actor.name: actor for actor in older.actors}

    def before(self, actor: ActorView) -> ActorView | None:
        """The same process in the older snapshot, if that has it."""
        earlier = self._older.get(actor.name)
        return earlier if earlier is not None and earlier.incarnation == actor.incarnation else None

    def rate(self, actor: ActorView, name: str) -> float | None:
        """Return a counter's increase per second between the last heartbeats before both snapshots; None if unknown."""
        value, before = actor.metrics.get(name), self.before(actor)
        if value is None or before is None:
            return None
        # ``heard_s`` is the age of the last heartbeat. Below 0.1 s, both snapshots have the same heartbeat.
        seconds = self.seconds - actor.heard_s + before.heard_s
        return max(0.0, value - before.metrics.get(name, 0.0)) / seconds if seconds > 0.1 else None

    def seconds_by_state(self, actor: ActorView, resource: Resource) -> dict[str, float]:
        """Return the seconds that a resource spent in each state in the interval, or since its start.

        If the older snapshot lacks a resource that is older than the interval, its state "starting" loses the time
        before the interval. If the sum still exceeds the interval, the result is empty: the times are unknown.
        """
        before = self.before(actor)
        earlier: Mapping[str, float] = {}
        if before is not None:
            earlier = next((each.spent for each in before.resources if each.name == resource.name), {})
        spent = resource.spent
        # The seconds of a resource that was replaced inside its actor begin at 0.
        if sum(spent.values()) < sum(earlier.values()) - 1e-6:
            earlier = {}
        if not earlier and 0.0 < self.seconds < (age := sum(spent.values())):
            starting_s = max(0.0, spent.get("starting", 0.0) - (age - self.seconds))
            spent_here = {**spent, "starting": starting_s}
            # Rounding may make the sum a little larger than the interval.
            return _without_zeros(spent_here) if sum(spent_here.values()) <= self.seconds + 1e-6 else {}
        return _without_zeros({state: seconds - earlier.get(state, 0.0) for state, seconds in spent.items()})

    def shares(self, resources: Iterable[tuple[ActorView, Resource]]) -> Shares:
        """Return the shares of states in the summed time of all ``resources``; empty if no time has passed."""
        sums: dict[str, float] = {}
        for actor, resource in resources:
            for state, seconds in self.seconds_by_state(actor, resource).items():
                sums[state] = sums.get(state, 0.0) + seconds
        whole = sum(sums.values())
        return {state: seconds / whole for state, seconds in sums.items()} if whole > 0 else {}

    def histogram(self, actor: ActorView, name: str) -> Histogram | None:
        """Return the values that a histogram counted in the interval; None if the actor has no such histogram.

        Without the same process or the same buckets in the older snapshot, all values count.
        """
        after, before = actor.histograms.get(name), self.before(actor)
        if after is None:
            return None
        earlier = before.histograms.get(name) if before is not None else None
        if earlier is None or len(earlier.counts) != len(after.counts):
            return after
        counts = [max(0, new - old) for new, old in zip(after.counts, earlier.counts, strict=True)]
        return Histogram(counts, max(0.0, after.sum - earlier.sum))


def _without_zeros(seconds: dict[str, float]) -> dict[str, float]:
    return {state: each for state, each in seconds.items() if each > 1e-9}


def total(values: Iterable[float | None]) -> float | None:
    """Sum of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def time_mean(moments: Sequence[tuple[float, float | None]]) -> float | None:
    """Compute the mean over time of a level, from ``moments``: (time, level) in order of time.

    Between two moments the level changes linearly. Unknown levels are skipped; None if no level is known.
    """
    known = [(at, level) for at, level in moments if level is not None]
    whole = known[-1][0] - known[0][0] if known else 0.0
    if whole <= 0.0:
        return mean(level for _, level in known)
    return sum((later - at) * (level + then) / 2 for (at, level), (later, then) in pairwise(known)) / whole


def median(values: Iterable[float | None]) -> float | None:
    """Median of the known values; None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

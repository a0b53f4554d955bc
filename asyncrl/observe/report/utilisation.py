"""States of the serial resources of a run over time, from its recorded snapshots. Pure.

Time is cut into spans between two snapshots; in each, the shares of the states of all resources of a kind add up to 1.
Spans across two attempts of a run are left out: nothing ran in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from asyncrl.messages.snapshot import ActorView, Resource, Snapshot
from asyncrl.observe.snapshots.rates import Interval, Shares

KINDS = {"engine": "Engines", "rank": "Learner ranks", "worker": "Reward workers", "player": "Episode workers"}
"""Kinds of resources."""


@dataclass(frozen=True, slots=True)
class Span:
    """Shares by state between two moments (Unix time, s), for each kind of resource that there was."""

    began: float
    ended: float
    shares: dict[str, Shares] = field(default_factory=dict)


def spans(snapshots: Iterable[Snapshot]) -> list[Span]:
    """Spans, one for each two neighbours, in order of time."""
    found: list[Span] = []
    older: Snapshot | None = None
    for newer in snapshots:
        if older is not None and older.run.attempt == newer.run.attempt and newer.wall > older.wall:
            found.append(_span(older, newer))
        older = newer
    return found


def _span(older: Snapshot, newer: Snapshot) -> Span:
    interval = Interval(older, newer)
    found: dict[str, list[tuple[ActorView, Resource]]] = {}
    for actor in newer.actors:
        for resource in actor.resources:
            found.setdefault(kind_of(actor, resource), []).append((actor, resource))
    shares = {kind: interval.shares(each) for kind, each in found.items()}
    return Span(older.wall, newer.wall, {kind: each for kind, each in shares.items() if each})


def kind_of(actor: ActorView, resource: Resource) -> str:
    """Kind of a resource: engine, rank, worker or player."""
    return "player" if actor.name.startswith("episodes/") else resource.name.partition("/")[0]


def evenly(walls: list[float], most: int) -> list[int]:
    """Indices of at most ``most`` of these times, first and last among them, spread evenly over the time.

    Where the clock was set back no time has passed.
    """
    if len(walls) <= most:
        return list(range(len(walls)))
    passed = list(accumulate((max(0.0, newer - older) for older, newer in pairwise(walls)), initial=0.0))
    chosen: list[int] = []
    for index, since in enumerate(passed[:-1]):
        if len(chosen) < most - 1 and since >= passed[-1] * len(chosen) / (most - 1):
            chosen.append(index)
    return [*chosen, len(walls) - 1]

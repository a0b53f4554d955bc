"""What the rollouters say they did, so that a step can be held against it: tokens, updates, overlap. Pure.

Statistics arrive up to an interval late; ``covers`` tells whether everything up to a time has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.learner import RolloutStats, UpdateTimes


@dataclass(slots=True)
class _Source:
    incarnation: int
    tokens: int = 0
    heard: float = 0.0


@dataclass(slots=True)
class GenerationLog:
    """Statistics of all rollouters. Times are wall clock, in seconds."""

    _sources: dict[str, _Source] = field(default_factory=dict)
    _tokens: int = 0
    _intervals: list[tuple[float, float]] = field(default_factory=list)
    _updates: list[tuple[str, UpdateTimes]] = field(default_factory=list)

    def add(self, name: str, incarnation: int, stats: RolloutStats, now: float) -> None:
        """Take a rollouter's statistics, which came at ``now``."""
        source = self._sources.get(name)
        if source is None or source.incarnation != incarnation:
            source = self._sources[name] = _Source(incarnation)
        self._tokens += stats.sampled_tokens - source.tokens
        source.tokens, source.heard = stats.sampled_tokens, now
        self._intervals += stats.sampling
        self._updates += [(name, update) for update in stats.updates]

    def covers(self, time: float, *, now: float, patience_s: float) -> bool:
        """Whether every rollouter has been heard of since ``time``; one silent for ``patience_s`` is not waited for."""
        return all(source.heard >= time or source.heard < now - patience_s for source in self._sources.values())

    def take(self) -> tuple[int, list[tuple[str, UpdateTimes]]]:
        """(tokens sampled, updates as (rollouter, times)) since the last call."""
        taken = (self._tokens, self._updates)
        self._tokens, self._updates = 0, []
        return taken

    def overlap(self, start: float, end: float) -> float:
        """Share of [start, end) in which tokens were being sampled anywhere; forgets what lies before ``start``."""
        self._intervals = merge([(a, b) for a, b in self._intervals if b > start])
        covered = sum(max(0.0, min(b, end) - max(a, start)) for a, b in self._intervals)
        return covered / (end - start) if end > start else 0.0


def merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as sorted disjoint ones."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


MEANS = ("stage_s", "pause_s", "load_s", "resume_s")
SUMS = ("stall_s", "bytes", "encoded_bytes")


def update_metrics(updates: Sequence[UpdateTimes]) -> dict[str, float]:
    """Figures of the weight updates of a step: means over the updates and, for what is lost or moved, sums.

    A mean is absent when there was nothing to take it over.
    """
    found: dict[str, float] = {"weights/updates": len(updates)}
    found |= {f"weights/{key}": sum(getattr(times, key) for times in updates) for key in SUMS}
    if updates:
        found |= {f"weights/{key}": sum(getattr(times, key) for times in updates) / len(updates) for key in MEANS}
    measured = [times.probe_kl for times in updates if times.probe_kl is not None]
    if measured:
        found["policy/probe_kl"] = max(measured)
    return found


def update_line(replica: str, times: UpdateTimes) -> dict[str, Any]:
    """The line of one replica's update."""
    line: dict[str, Any] = {
        "kind": "update",
        "replica": replica,
        "weights/version": times.version,
        "weights/transport": times.transport,
    }
    line |= {f"weights/{key}": getattr(times, key) for key in (*MEANS, *SUMS)}
    if times.checksum:
        line["weights/checksum"] = times.checksum
    if times.probe_kl is not None:
        line["policy/probe_kl"] = times.probe_kl
    return line

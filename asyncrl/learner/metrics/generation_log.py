"""Collects the rollouters' reports on their work, and gives each step its sampled tokens, updates and overlap. Pure.

A report arrives up to one report interval after the work; ``covers`` returns whether all reports up to a time are here.
The tokens of a report are spread evenly over the time since the previous one, so a step between two reports gets its
part. To bound memory, two consecutive reports may be joined. Invariant: each token counts in at most one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.learner import RolloutStats, UpdateTimes

MOST_HELD = 1 << 15
"""Number of reports, and of sampling intervals, above which some are joined."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that engines computed."""

    sampled: int
    reprefill: int
    """Tokens computed again because of updates."""


@dataclass(slots=True)
class _Source:
    """A rollouter, as of its last report."""

    incarnation: int
    tokens: Tokens
    """Tokens since the start of its incarnation."""
    last_report: float
    """Time of its last report; before the first, the time at which it began to sample."""
    idle: bool = False
    """Whether its last report says that it generates nothing."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Tokens of a rollouter in the time from ``since`` to ``until``."""

    name: str
    tokens: Tokens
    since: float
    until: float

    def joined(self, following: _Report) -> _Report:
        """Join this report and the next one of its rollouter."""
        earlier, later = self.tokens, following.tokens
        both = Tokens(earlier.sampled + later.sampled, earlier.reprefill + later.reprefill)
        return _Report(self.name, both, self.since, following.until)

    def within(self, start: float, end: float) -> float:
        """Share of the report's time that lies in [start, end)."""
        seconds = self.until - self.since
        if seconds <= 0.0:
            # The same bounds as in ``take_tokens``, so that the report counts exactly once.
            return 1.0 if start < self.until <= end else 0.0
        return max(0.0, min(end, self.until) - max(start, self.since)) / seconds


@dataclass(slots=True)
class GenerationLog:
    """Statistics of all rollouters. Times are wall clock, in seconds.

    ``succeeds``: whether an earlier learner of this run got reports and has counted the tokens in them. Then the first
    report of a rollouter only sets the number from which its later tokens are counted.
    """

    succeeds: bool = False
    _sources: dict[str, _Source] = field(default_factory=dict)
    """Each rollouter by name."""
    _reports: list[_Report] = field(default_factory=list)
    """Reports that ``take_tokens`` has not used up; those of one rollouter are in order of time."""
    _intervals: list[tuple[float, float]] = field(default_factory=list)
    """Times in which an engine sampled; they may overlap."""
    _updates: list[tuple[str, UpdateTimes]] = field(default_factory=list)
    """Weight updates since the last ``take_updates``, each with its rollouter."""

    def add(self, name: str, incarnation: int, stats: RolloutStats, now: float) -> None:
        """Take the statistics that a rollouter sent; they came at the time ``now``."""
        source, tokens = self._sources.get(name), Tokens(stats.sampled_tokens, stats.reprefill_tokens)
        if source is None or source.incarnation != incarnation:
            # A new incarnation counts from 0. A rollouter that an earlier learner knew counts from this report on.
            counted_before = Tokens(0, 0) if source is not None or not self.succeeds else tokens
            # The clock of the rollouter's host may differ, so only the length of its sampling counts.
            began = now - _extent(stats.sampling)
            source = self._sources[name] = _Source(incarnation, counted_before, began)
        new_tokens = Tokens(tokens.sampled - source.tokens.sampled, tokens.reprefill - source.tokens.reprefill)
        self._reports.append(_Report(name, new_tokens, source.last_report, now))
        source.tokens, source.last_report, source.idle = tokens, now, stats.idle
        self._intervals += stats.sampling
        if len(self._reports) > max(MOST_HELD, 2 * len(self._sources)):
            self._reports = in_pairs(self._reports)
        if len(self._intervals) > MOST_HELD:
            self._intervals = merge(self._intervals)
        self._updates += [(name, update) for update in stats.updates]

    def covers(self, time: float, *, now: float, patience_s: float) -> bool:
        """Whether each rollouter that generates has reported since ``time``, or has been silent for ``patience_s``."""
        return all(
            source.idle or source.last_report >= time or source.last_report < now - patience_s
            for source in self._sources.values()
        )

    def take_tokens(self, start: float, end: float) -> Tokens | None:
        """Tokens sampled in [start, end); None if no report ends after ``start`` and no rollouter is idle.

        Forgets reports that end by ``end``.
        """
        reports = [each for each in self._reports if each.until > start]
        self._reports = [each for each in reports if each.until > end]
        if not reports and not any(source.idle for source in self._sources.values()):
            return None
        return Tokens(
            sampled=round(sum(each.within(start, end) * each.tokens.sampled for each in reports)),
            reprefill=round(sum(each.within(start, end) * each.tokens.reprefill for each in reports)),
        )

    def take_updates(self) -> list[tuple[str, UpdateTimes]]:
        """Return the weight updates that were reported since the last call, as (rollouter, times)."""
        taken, self._updates = self._updates, []
        return taken

    def overlap(self, start: float, end: float) -> float:
        """Share of [start, end) in which any engine sampled tokens. Forgets intervals that end by ``start``."""
        self._intervals = merge([(a, b) for a, b in self._intervals if b > start])
        covered = sum(max(0.0, min(b, end) - max(a, start)) for a, b in self._intervals)
        return covered / (end - start) if end > start else 0.0


def in_pairs(reports: Sequence[_Report]) -> list[_Report]:
    """Join consecutive reports of each rollouter in pairs. Each rollouter's reports stay in order of time.

    Reports with a gap between them, as before a new incarnation, are not joined.
    """
    found: list[_Report] = []
    unpaired: dict[str, _Report] = {}
    for report in reports:
        earlier = unpaired.pop(report.name, None)
        if earlier is not None and earlier.until == report.since:
            found.append(earlier.joined(report))
            continue
        if earlier is not None:
            found.append(earlier)
        unpaired[report.name] = report
    return [*found, *unpaired.values()]


def _extent(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds from the beginning of the first interval to the end of the last, by any clock."""
    return max(end for _, end in intervals) - min(start for start, _ in intervals) if intervals else 0.0


def merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals: sorted, without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            last_start, last_end = merged[-1]
            merged[-1] = (last_start, max(end, last_end))
        else:
            merged.append((start, end))
    return merged


MEANS = ("stage_s", "pause_s", "load_s", "resume_s")
LARGEST = ("drift", "drift_worst", "probe_kl")
SUMS = ("stall_s", "bytes", "encoded_bytes")
"""MEANS, LARGEST and SUMS: fields of UpdateTimes, by the way in which a step's line combines those of its updates."""


def update_metrics(updates: Sequence[UpdateTimes]) -> dict[str, float]:
    """Metrics of a step's weight updates: their number, sums, means and largest values. Without updates no means."""
    metrics: dict[str, float] = {"weights/updates": len(updates)}
    metrics |= {f"weights/{key}": sum(getattr(times, key) for times in updates) for key in SUMS}
    if updates:
        metrics |= {f"weights/{key}": sum(getattr(times, key) for times in updates) / len(updates) for key in MEANS}
    for key in LARGEST:
        measured = [getattr(times, key) for times in updates if getattr(times, key) is not None]
        if measured:
            metrics[f"policy/{key}"] = max(measured)
    return metrics


def update_line(replica: str, times: UpdateTimes) -> dict[str, Any]:
    """The line of metrics.jsonl for one weight update of one replica."""
    line: dict[str, Any] = {
        "kind": "update",
        "replica": replica,
        "weights/version": times.version,
        "weights/transport": times.transport,
    }
    line |= {f"weights/{key}": getattr(times, key) for key in (*MEANS, *SUMS)}
    if times.checksum:
        line["weights/checksum"] = times.checksum
    line |= {f"policy/{key}": getattr(times, key) for key in LARGEST if getattr(times, key) is not None}
    return line

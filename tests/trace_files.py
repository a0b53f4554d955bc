"""Traces in tests: made on a clock of their own, read by actor and track, checked against the schema."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema

from asyncrl.observe.trace import Trace

WALL = 1_700_000_000.123_456_7
"""Unix time (s) when the clock of a trace is at 0."""
SCHEMA = json.loads((Path(__file__).parent / "observe" / "chrome_trace.schema.json").read_text())


@dataclass(frozen=True)
class Span:
    """Times in whole microseconds; ``end`` is None for an open span."""

    name: str
    began: int
    end: int | None
    facts: dict[str, Any] = field(default_factory=dict)

    def overlap(self, other: Span) -> int:
        """Microseconds that both last."""
        assert self.end is not None and other.end is not None
        return max(0, min(self.end, other.end) - max(self.began, other.began))


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 12.5

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return WALL + self.seconds


def make_trace(window_s: float = 300.0, kept: int = 100) -> tuple[Time, Trace]:
    """With its clock."""
    time = Time()
    return time, Trace(time.now, time.wall, window_s=window_s, kept=kept)


def load(path: Path) -> dict[str, dict[str, list[Span]]]:
    """Spans by actor and track, in order. The file matches the schema, and no track has two spans at once."""
    trace = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    events = trace["traceEvents"]
    actors = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for e in events:
        if e["ph"] != "M":
            end = e["ts"] + e["dur"] if e["ph"] == "X" else None
            found[actors[e["pid"]]][tracks[e["pid"], e["tid"]]].append(Span(e["name"], e["ts"], end, e.get("args", {})))
    for spans in (spans for by_track in found.values() for spans in by_track.values()):
        spans.sort(key=lambda span: (span.began, span.end is None, span.end))
        for one, other in pairwise(spans):
            assert one.end is not None and one.end <= other.began, (one, other)
    return found


def slots(actor: dict[str, list[Span]]) -> list[Span]:
    """Spans of the slots of a rollouter."""
    return [span for track, spans in actor.items() if track.startswith("slot ") for span in spans]


def generation(trace: dict[str, dict[str, list[Span]]]) -> list[Span]:
    """Submissions to engines that have ended."""
    spans = [span for actor, by_track in trace.items() if actor.startswith("rollouter/") for span in slots(by_track)]
    return [span for span in spans if span.name.startswith("generate ") and span.end is not None]

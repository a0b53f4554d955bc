"""The timeline of an actor: the newest spans of its tracks. Pure, except for the clocks.

A *span* is a time with a name and facts. A *track* does one thing at a time: the actor itself, a slot of an engine, a
worker process, the steps of a learner. A new span ends the one before, so spans of a track never overlap.

Invariants: the trace keeps the newest ended spans, at most ``kept``, of the last ``window_s`` seconds. Times come from
the monotonic clock plus an offset to Unix time. The offset is fixed at the start, so a change of the wall clock moves
no span. Threads may share a trace; one thread at a time uses a track.

The file has Chrome's trace event format, which Perfetto reads: ``X`` for an ended span, ``B`` for an open one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from asyncrl.messages.monitor import TraceSpan

SPANS_IN_PART = 1000
SPANS_KEPT = 16_384
"""Most spans of one actor; about 8 MB."""
SPANS_OF_RUN = 262_144
"""Most spans of all actors together, up to 1024 actors: a file of about 40 MB, which a browser still shows."""
LEAST_SPANS_KEPT = 256
"""Number of spans that each actor may keep in any case: a few rounds of its slots."""
Fact = str | int | float | bool
_END: Final = 3
"""Position of the end in a kept span (track, name, began, end, facts)."""

# Positions of an actor's tracks in the view, from the top.
STATES, STEPS, PHASES, CHECKPOINTS, WEIGHTS, FIRST_SLOT = 0, 1, 2, 3, 4, 100


class Track:
    """One track; made by ``Trace.track``."""

    __slots__ = ("_ended", "_open", "_trace", "name", "order")

    def __init__(self, trace: Trace, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self._trace = trace
        self._open: tuple[str, float, dict[str, Fact]] | None = None
        """(name, begin, facts) of the open span; None without one."""
        self._ended = float("-inf")
        """End of the last span, on the clock of the trace."""

    def enter(self, name: str, **facts: Fact) -> None:
        """End the open span, if there is one, and begin the span ``name``."""
        trace = self._trace
        if trace.on:
            with trace.lock:
                now = trace.now()
                self._close(now, {})
                self._open = name, now, facts

    def leave(self, **facts: Fact) -> None:
        """End the open span, if there is one, and add ``facts`` to it."""
        trace = self._trace
        if trace.on:
            with trace.lock:
                self._close(trace.now(), facts)

    def add(self, name: str, began: float, **facts: Fact) -> None:
        """Add a span from ``began``, on the clock of the trace, until now. No span may be open.

        A ``began`` before the end of the last span, or after now, is moved there: spans do not overlap, and none is
        negative.
        """
        trace = self._trace
        if trace.on:
            with trace.lock:
                assert self._open is None, f"{self.name} has an open span"
                now = trace.now()
                self._open = name, min(now, max(began, self._ended)), facts
                self._close(now, {})

    def _close(self, now: float, facts: dict[str, Fact]) -> None:
        """End the open span, if there is one, and keep it. The caller holds the lock."""
        if self._open is not None:
            name, began, known = self._open
            self._open, self._ended = None, now
            if facts:
                known.update(facts)
            self._trace.keep((self, name, began, now, known))


class Trace:
    """The timeline of an actor. ``now`` is a monotonic clock, ``wall`` Unix time, both in seconds.

    With ``window_s`` 0 no span is kept.
    """

    def __init__(
        self, now: Callable[[], float], wall: Callable[[], float], *, window_s: float, kept: int = SPANS_KEPT
    ) -> None:
        self.now = now
        self.on = window_s > 0
        """Whether spans are kept."""
        self.lock = threading.Lock()
        self._window_s = window_s
        self._offset = wall() - now()
        """Seconds to add to the clock ``now`` for Unix time."""
        self._tracks: dict[str, Track] = {}
        self._spans: deque[tuple[Track, str, float, float, dict[str, Fact]]] = deque(maxlen=kept)

    def track(self, name: str, order: int) -> Track:
        """The track of this name, made at the first call. ``order`` is its position, which no other track has."""
        with self.lock:
            track = self._tracks.get(name)
            if track is None:
                track = self._tracks[name] = Track(self, name, order)
            return track

    def keep(self, span: tuple[Track, str, float, float, dict[str, Fact]]) -> None:
        """Keep a span (track, name, began, end, facts) and drop those before the window. The caller holds the lock."""
        spans, horizon = self._spans, span[_END] - self._window_s
        while spans and spans[0][_END] < horizon:
            spans.popleft()
        spans.append(span)

    def parts(self) -> Iterator[list[TraceSpan]]:
        """Yields the kept spans in order of their end, at most SPANS_IN_PART at a time; open spans come last.

        Making the spans takes long, so an event loop can run other tasks between parts.
        """
        with self.lock:
            horizon = self.now() - self._window_s
            ended = [span for span in self._spans if span[_END] >= horizon]
            open_spans = [(track, *track._open) for track in self._tracks.values() if track._open is not None]
            # The length -1 means that a span is open. Its facts are copied, because it gets more when it ends.
            running = [
                TraceSpan(track.name, track.order, name, began + self._offset, -1.0, dict(facts))
                for track, name, began, facts in open_spans
            ]
        for at in range(0, len(ended), SPANS_IN_PART):
            yield [self._span(*span) for span in ended[at : at + SPANS_IN_PART]]
        for at in range(0, len(running), SPANS_IN_PART):
            yield running[at : at + SPANS_IN_PART]

    def _span(self, track: Track, name: str, began: float, end: float, facts: dict[str, Fact]) -> TraceSpan:
        # Unix times are subtracted, so that began plus seconds is exactly the end.
        since = began + self._offset
        return TraceSpan(track.name, track.order, name, since, (end + self._offset) - since, facts)


def spans_kept(actors: int) -> int:
    """Number of spans that each actor of a run with so many ``actors`` keeps."""
    return min(SPANS_KEPT, max(LEAST_SPANS_KEPT, SPANS_OF_RUN // actors))


def _tid(pid: int, order: int) -> int:
    """Thread number of a track. It differs from all others and from all pids, since some viewers mix up equal ones."""
    return pid * 100_000 + order


def process_events(pid: int, name: str) -> list[dict[str, Any]]:
    """Events that give an actor its name and place in the file."""
    return _place_events("process", pid, 0, name, pid)


def track_events(pid: int, track: str, order: int) -> list[dict[str, Any]]:
    """Events that give a track its name and place in the file."""
    return _place_events("thread", pid, _tid(pid, order), track, order)


def _place_events(kind: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, Any]]:
    """Make the metadata events of a process or a thread: its name, and its position from the top."""
    facts = {"name": {"name": name}, "sort_index": {"sort_index": place}}
    return [{"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": args} for what, args in facts.items()]


def span_events(pid: int, spans: Iterable[TraceSpan]) -> list[dict[str, Any]]:
    """Spans as events of the file, in whole microseconds of Unix time."""
    events = []
    for span in spans:
        began = round(span.began * 1e6)
        event: dict[str, Any] = {"ph": "B", "name": span.name, "pid": pid, "tid": _tid(pid, span.order), "ts": began}
        if span.seconds >= 0:
            # Both ends are rounded, so that the next span begins where this one ends.
            event |= {"ph": "X", "dur": round((span.began + span.seconds) * 1e6) - began}
        if span.facts:
            event["args"] = span.facts
        events.append(event)
    return events

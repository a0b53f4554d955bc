"""The timeline of an actor: what each of its tracks did when, kept for a while. Pure, but for the clocks it is given.

A track is something serial: the actor itself, a slot of an engine, a worker process, the steps of a learner. It does
one thing at a time: what it enters ends what it did before. So spans of one track never overlap, and what has not
ended yet is known as such.

Invariants: at most ``kept`` spans that have ended are kept, of the last ``window_s`` seconds, and it is always the
oldest that go; times are read from the monotonic clock and told as Unix time by one offset for the whole process, so
that no step of the wall clock tears them apart. Safe to use from several threads, a track from one at a time.

The file is in the trace event format of Chrome, which Perfetto reads: ``X`` for what has ended, ``B`` for what goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from asyncrl.messages.monitor import TraceSpan

SPANS_IN_PART = 1000
SPANS_KEPT = 16_384
"""Spans that one actor keeps at most; about 8 MB."""
SPANS_OF_RUN = 262_144
"""Spans that all actors keep, where they are many: a file of about 40 MB, which a browser still shows."""
LEAST_SPANS_KEPT = 256
"""Spans that one actor keeps however many there are: a few rounds of its slots."""
Fact = str | int | float | bool

# Places of the tracks of an actor, from the top.
STATES, STEPS, PHASES, CHECKPOINTS, WEIGHTS, FIRST_SLOT = 0, 1, 2, 3, 4, 100


class Track:
    """One track; made by ``Trace.track``."""

    __slots__ = ("_ended", "_open", "_trace", "name", "order")

    def __init__(self, trace: Trace, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self._trace = trace
        self._open: tuple[str, float, dict[str, Fact]] | None = None
        self._ended = float("-inf")
        """End of the last span."""

    def enter(self, name: str, **facts: Fact) -> None:
        """Be at ``name`` from now on."""
        trace = self._trace
        if trace.on:
            with trace.lock:
                now = trace.now()
                self._close(now, {})
                self._open = name, now, facts

    def leave(self, **facts: Fact) -> None:
        """Do nothing from now on; ``facts`` are added to those of what has ended. Harmless where nothing was done."""
        trace = self._trace
        if trace.on:
            with trace.lock:
                self._close(trace.now(), facts)

    def add(self, name: str, began: float, **facts: Fact) -> None:
        """Add a span that has just ended and ``began`` then, on the clock of the trace. Nothing is open."""
        trace = self._trace
        if trace.on:
            with trace.lock:
                assert self._open is None, f"{self.name} is at something else"
                now = trace.now()
                self._open = name, min(now, max(began, self._ended)), facts
                self._close(now, {})

    def _close(self, now: float, facts: dict[str, Fact]) -> None:
        if self._open is not None:
            name, began, known = self._open
            self._open, self._ended = None, now
            if facts:
                known.update(facts)
            self._trace.keep((self, name, began, now, known))


class Trace:
    """The timeline of an actor. ``now`` is monotonic, ``wall`` Unix time, both in seconds."""

    def __init__(
        self, now: Callable[[], float], wall: Callable[[], float], *, window_s: float, kept: int = SPANS_KEPT
    ) -> None:
        self.now = now
        self.on = window_s > 0
        """Whether anything is kept at all."""
        self.lock = threading.Lock()
        self._window_s = window_s
        self._offset = wall() - now()
        self._tracks: dict[str, Track] = {}
        self._spans: deque[tuple[Track, str, float, float, dict[str, Fact]]] = deque(maxlen=kept)

    def track(self, name: str, order: int) -> Track:
        """The track of this name. ``order`` is its place among the others, and no other's."""
        with self.lock:
            track = self._tracks.get(name)
            if track is None:
                track = self._tracks[name] = Track(self, name, order)
            return track

    def keep(self, span: tuple[Track, str, float, float, dict[str, Fact]]) -> None:
        """Keep a span; for tracks, which hold the lock."""
        spans, horizon = self._spans, span[3] - self._window_s
        while spans and spans[0][3] < horizon:
            spans.popleft()
        spans.append(span)

    def parts(self) -> Iterator[list[TraceSpan]]:
        """Spans kept at the first call, in order of their end, SPANS_IN_PART at a time; those that go on come last.

        Making the spans takes longer than finding them, so that the holder of an event loop does it part by part.
        """
        with self.lock:
            horizon = self.now() - self._window_s
            ended = [span for span in self._spans if span[3] >= horizon]
            # Facts are added to these when they end.
            running = [
                TraceSpan(track.name, track.order, open[0], open[1] + self._offset, -1.0, dict(open[2]))
                for track in self._tracks.values()
                if (open := track._open) is not None
            ]
        for at in range(0, len(ended), SPANS_IN_PART):
            yield [self._span(*span) for span in ended[at : at + SPANS_IN_PART]]
        for at in range(0, len(running), SPANS_IN_PART):
            yield running[at : at + SPANS_IN_PART]

    def _span(self, track: Track, name: str, began: float, end: float, facts: dict[str, Fact]) -> TraceSpan:
        # Taken from each other as Unix times, so that exactly the end comes out where both are added again.
        since = began + self._offset
        return TraceSpan(track.name, track.order, name, since, (end + self._offset) - since, facts)


def spans_kept(actors: int) -> int:
    """Spans that each of so many actors keeps."""
    return min(SPANS_KEPT, max(LEAST_SPANS_KEPT, SPANS_OF_RUN // actors))


def _tid(pid: int, order: int) -> int:
    """Number of a track. No other's in the file, nor a process's: some readers take equal ones for the same thing."""
    return pid * 100_000 + order


def process_events(pid: int, name: str) -> list[dict[str, Any]]:
    """Events that give an actor its name and place in the file."""
    return _placing("process", pid, 0, name, pid)


def track_events(pid: int, track: str, order: int) -> list[dict[str, Any]]:
    """Events that give a track its name and place in the file."""
    return _placing("thread", pid, _tid(pid, order), track, order)


def _placing(kind: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, Any]]:
    facts = {"name": {"name": name}, "sort_index": {"sort_index": place}}
    return [{"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": args} for what, args in facts.items()]


def span_events(pid: int, spans: Iterable[TraceSpan]) -> list[dict[str, Any]]:
    """Spans as they stand in the file, in whole microseconds of Unix time."""
    found = []
    for span in spans:
        began = round(span.began * 1e6)
        event: dict[str, Any] = {"ph": "B", "name": span.name, "pid": pid, "tid": _tid(pid, span.order), "ts": began}
        if span.seconds >= 0:
            # Both ends are rounded, so that what comes next begins where this ends.
            event |= {"ph": "X", "dur": round((span.began + span.seconds) * 1e6) - began}
        if span.facts:
            event["args"] = span.facts
        found.append(event)
    return found

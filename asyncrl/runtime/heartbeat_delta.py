"""The facts of an actor for its next heartbeat: those that have changed since the controller was told of them.

Values are cumulative, so a heartbeat that is lost takes nothing with it that the next full one does not bring: every
FULL_BEATS heartbeats all is told anew, and at once when the controller does not know this actor, as after its own
restart, or when a heartbeat could not go. Invariant: a heartbeat holds at most MOST_FIGURES figures, MOST_HISTOGRAMS
histograms, MOST_RESOURCES resources and EVENTS_IN_BEAT events, however many there are; what had to wait is counted and
comes next, those first that waited longest. A resource that is still where it was told to be is left out: the
controller counts its time on, where no other had to wait. Pure.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.messages.monitor import EventRecord, Heartbeat, ResourceRecord
from asyncrl.wire.codec import encodable

T = TypeVar("T")

FULL_BEATS = 10
MOST_FIGURES = 256
MOST_HISTOGRAMS = 32
MOST_RESOURCES = 64
EVENTS_IN_BEAT = 8
EVENTS_KEPT = 64
EVENT_TOLD = 2
"""Heartbeats that an event is in, so that one that is lost does not take it along."""
LONGEST_EVENT = 300


class UntoldEvents:
    """Warnings and errors of an actor that are still to be told. Filled by any thread."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting: deque[list[Any]] = deque()
        """[event, number of heartbeats that it was in], the oldest first."""
        self._number = 0
        self.dropped = 0
        """Events that were never in any heartbeat."""

    @property
    def number(self) -> int:
        """Number of the newest event."""
        return self._number

    def add(self, level: str, text: str) -> None:
        """Add an event that is worth knowing."""
        text = encodable(text)[:LONGEST_EVENT]
        with self._lock:
            self._number += 1
            self._waiting.append([EventRecord(self._number, self._wall(), level, text), 0])
            while len(self._waiting) > EVENTS_KEPT:
                self.dropped += self._waiting.popleft()[1] == 0

    def take(self) -> list[EventRecord]:
        """Events for the next heartbeat."""
        with self._lock:
            taken = list(self._waiting)[:EVENTS_IN_BEAT]
            for event in taken:
                event[1] += 1
            while self._waiting and self._waiting[0][1] >= EVENT_TOLD:
                self._waiting.popleft()
            return [event for event, _ in taken]


class Telling:
    """The facts that one controller was told."""

    def __init__(self) -> None:
        self._figures: _Told[float] = _Told(MOST_FIGURES)
        self._histograms: _Told[Any] = _Told(MOST_HISTOGRAMS)
        self._resources: _Told[tuple[Any, ...]] = _Told(MOST_RESOURCES)
        self._beats = 0
        self.late = 0
        """Figures, histograms and resources that had to wait, since the start."""

    def forget(self) -> None:
        """The controller may know nothing."""
        # Without a lock, though ``trim`` runs in another thread: a call that is lost to it, the next full beat makes
        # good.
        self._beats = 0

    def trim(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with what is to be told; it is taken for told."""
        if self._beats % FULL_BEATS == 0:
            for told in (self._figures, self._histograms, self._resources):
                told.forget()
        self._beats += 1
        figures = self._figures.news(beat.counters)
        histograms = self._histograms.news(beat.histograms)
        resources = self._resources.news({resource.name: _stay(resource) for resource in beat.resources})
        self.late += self._figures.left + self._histograms.left + self._resources.left
        return msgspec.structs.replace(
            beat,
            counters={name: beat.counters[name] for name in figures},
            histograms={name: beat.histograms[name] for name in histograms},
            resources=[resource for resource in beat.resources if resource.name in resources],
            held_back=self._resources.left > 0,
        )


def _stay(resource: ResourceRecord) -> tuple[Any, ...]:
    """Values that are the same for as long as a resource stays where it is."""
    before = {name: seconds for name, seconds in resource.seconds.items() if name != resource.state}
    # Both grow alike while it stays; their difference does not, but for the rounding of floats.
    earlier = round(resource.seconds.get(resource.state, 0.0) - resource.state_s, 3)
    return resource.state, resource.awaiting, before, earlier


class _Told(Generic[T]):
    """Values by name as they were told."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, T] = {}
        self._told: dict[str, int] = {}
        """Number of the call in which each was told last."""
        self._calls = 0
        self.left = 0
        """Values that had to wait at the last call."""

    def forget(self) -> None:
        self._values = {}

    def news(self, values: Mapping[str, T]) -> set[str]:
        """The names of the values that are to be told now; they are taken for told from here on."""
        self._calls += 1
        unknown = object()
        changed = [name for name, value in values.items() if self._values.get(name, unknown) != value]
        if len(changed) > self._most:
            changed.sort(key=lambda name: self._told.get(name, 0))
        self.left = max(0, len(changed) - self._most)
        for name in changed[: self._most]:
            self._values[name], self._told[name] = values[name], self._calls
        return set(changed[: self._most])

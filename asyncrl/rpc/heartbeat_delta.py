"""Reduces a heartbeat to what has changed since the controller got it last.

All values are cumulative. Every FULL_BEATS heartbeats one is complete, and so is the next one after the controller was
restarted or a heartbeat could not be sent. So a lost heartbeat loses nothing for long.

Invariant: a heartbeat holds at most MOST_METRICS metrics, MOST_HISTOGRAMS histograms, MOST_RESOURCES resources and
EVENTS_IN_BEAT events. The values that have to wait are counted and come next, the oldest first. A resource that is
still in its state is left out: the controller continues its time, unless another resource had to wait. Pure.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.messages.monitor import EventRecord, Heartbeat, ResourceRecord
from asyncrl.rpc.wire.codec import encodable

T = TypeVar("T")

FULL_BEATS = 10
MOST_METRICS = 256
MOST_HISTOGRAMS = 32
MOST_RESOURCES = 64
EVENTS_IN_BEAT = 8
EVENTS_KEPT = 64
EVENT_REPEATS = 2
"""Heartbeats that carry an event, so that it survives the loss of one."""
LONGEST_EVENT = 300


class EventQueue:
    """Warnings and errors of an actor that are still to be sent. Filled by any thread."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting: deque[list[Any]] = deque()
        """[event, number of heartbeats that had it], the oldest first."""
        self._number = 0
        self.dropped = 0
        """Events that were never in any heartbeat."""

    @property
    def number(self) -> int:
        """Number of the newest event."""
        return self._number

    def add(self, level: str, text: str) -> None:
        """Add an event."""
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
            while self._waiting and self._waiting[0][1] >= EVENT_REPEATS:
                self._waiting.popleft()
            return [event for event, _ in taken]


class HeartbeatDelta:
    """The values that the controller has."""

    def __init__(self) -> None:
        self._metrics: _Sent[float] = _Sent(MOST_METRICS)
        self._histograms: _Sent[Any] = _Sent(MOST_HISTOGRAMS)
        self._resources: _Sent[tuple[Any, ...]] = _Sent(MOST_RESOURCES)
        self._beats = 0
        self.late = 0
        """Metrics, histograms and resources that had to wait, since the start."""

    def forget(self) -> None:
        """Make the next heartbeat complete: the controller may know nothing."""
        # Without a lock, though ``trim`` runs in another thread: the next complete heartbeat makes up for a lost call.
        self._beats = 0

    def trim(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with the changed values, which count as sent."""
        if self._beats % FULL_BEATS == 0:
            for sent in (self._metrics, self._histograms, self._resources):
                sent.forget()
        self._beats += 1
        metrics = self._metrics.news(beat.counters)
        histograms = self._histograms.news(beat.histograms)
        resources = self._resources.news({resource.name: _stay(resource) for resource in beat.resources})
        self.late += self._metrics.left + self._histograms.left + self._resources.left
        return msgspec.structs.replace(
            beat,
            counters={name: beat.counters[name] for name in metrics},
            histograms={name: beat.histograms[name] for name in histograms},
            resources=[resource for resource in beat.resources if resource.name in resources],
            held_back=self._resources.left > 0,
        )


def _stay(resource: ResourceRecord) -> tuple[Any, ...]:
    """Values that stay the same while a resource stays in its state."""
    before = {name: seconds for name, seconds in resource.seconds.items() if name != resource.state}
    # Both grow alike while it stays; their difference does not, but for the rounding of floats.
    earlier = round(resource.seconds.get(resource.state, 0.0) - resource.state_s, 3)
    return resource.state, resource.awaiting, before, earlier


class _Sent(Generic[T]):
    """The values that were sent, by name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, T] = {}
        self._sent: dict[str, int] = {}
        """Number of the call that sent each value last."""
        self._calls = 0
        self.left = 0
        """Values that had to wait at the last call."""

    def forget(self) -> None:
        self._values = {}

    def news(self, values: Mapping[str, T]) -> set[str]:
        """The names of the values to send now, which count as sent."""
        self._calls += 1
        unknown = object()
        changed = [name for name, value in values.items() if self._values.get(name, unknown) != value]
        if len(changed) > self._most:
            changed.sort(key=lambda name: self._sent.get(name, 0))
        self.left = max(0, len(changed) - self._most)
        for name in changed[: self._most]:
            self._values[name], self._sent[name] = values[name], self._calls
        return set(changed[: self._most])

"""The open waits of an actor, for its heartbeats: on which actor, for what, since when.

A wait is often a loop around a repeated call. Its time is that of the whole loop and not that of the last call. So the
code that waits opens the wait around all of it:

    with self.awaits.on("learner/0", "Deliver"):
        while not await self._asked_once_more(): ...

``whom`` is an actor, a role (for any of its actors), or a part of this actor, such as its engine. ``what`` is the type
of the repeated request. ``idle`` waits are normal idleness, such as a parked request for more work: they show which
actor an idle one depends on, and are no sign of trouble.

Invariant: a wait is known from its beginning to its end, however it ends. Other threads may read the waits. The cost of
reading grows with the number of different waits only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from asyncrl.messages.snapshot import Wait

MOST_RECORDS = 8
"""Largest number of waits in a heartbeat."""

Key = tuple[str, str, bool]


class Await:
    """One wait, open within its ``with``, or from ``begin`` to ``end``."""

    __slots__ = ("_awaits", "_key", "since")

    def __init__(self, awaits: Awaits, key: Key) -> None:
        self._awaits, self._key = awaits, key
        self.since = 0.0

    def begin(self) -> None:
        """Open the wait."""
        with self._awaits.lock:
            self.since = self._awaits.now()
            self._awaits.open.setdefault(self._key, {})[self] = None

    def end(self) -> None:
        """End the wait."""
        with self._awaits.lock:
            waits = self._awaits.open[self._key]
            del waits[self]
            # An entry without a wait would have no oldest one.
            if not waits:
                del self._awaits.open[self._key]

    def renew(self) -> None:
        """Restart the time of the wait: it is for the next item from now on."""
        with self._awaits.lock:
            self.since = self._awaits.now()
            # The oldest stays first.
            waits = self._awaits.open[self._key]
            del waits[self]
            waits[self] = None

    def __enter__(self) -> Await:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


class Awaits:
    """The open waits of one actor, on the clock ``now`` (monotonic, s)."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.lock = threading.Lock()
        """Protects ``open``."""
        self.open: dict[Key, dict[Await, None]] = {}
        """Waits of the same kind, the oldest first."""

    def on(self, whom: str, what: str, *, idle: bool = False) -> Await:
        """A wait that lasts as long as its ``with``. The same one is not opened twice at a time."""
        return Await(self, (whom, what, idle))

    def records(self) -> list[Wait]:
        """The oldest wait of each kind, the oldest first."""
        with self.lock:
            now = self.now()
            oldest = [(next(iter(waits)).since, key) for key, waits in self.open.items()]
        oldest.sort()
        return [Wait(whom, what, now - since, idle) for since, (whom, what, idle) in oldest]


def longest_waits(records: list[Wait]) -> list[Wait]:
    """At most MOST_RECORDS of the records, the oldest first; idle ones go before any other is left out."""
    kept = sorted(records, key=lambda record: (record.idle, -record.seconds))[:MOST_RECORDS]
    return sorted(kept, key=lambda record: -record.seconds)

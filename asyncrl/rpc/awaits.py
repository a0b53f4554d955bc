"""The open waits of an actor, for its heartbeats: on which actor, for what, since when.

A wait is often a loop around a repeated call. Its time is that of the whole loop and not that of the last call. So the
code that waits opens the wait around all of it:

    with self.awaits.on("learner/0", "Deliver"):
        while not await self._asked_once_more(): ...

The first argument is an actor, a role (for any of its actors), or a part of this actor, such as its engine. The second
is the type of the repeated request. ``idle`` marks a wait that is normal, such as a parked request for more work. It
shows which actor an idle actor depends on, and is no sign of trouble.

Invariant: a wait is known from its beginning to its end, however it ends. Other threads may read the waits. The cost of
reading grows with the number of different waits only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from asyncrl.messages.monitor import Wait

MOST_RECORDS = 8
"""Largest number of waits in a heartbeat."""

Key = tuple[str, str, bool]
"""Arguments of ``Awaits.on``: the actor, role or part that is waited for, the request type, and ``idle``."""


class Await:
    """One wait. It is open within its ``with``, or from ``begin`` to ``end``."""

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
            # ``records`` reads the oldest wait of each key, so no key may stay without one.
            if not waits:
                del self._awaits.open[self._key]

    def renew(self) -> None:
        """Restart the time of the wait, which is for the next item from now on."""
        with self._awaits.lock:
            self.since = self._awaits.now()
            # Move this wait to the end: the waits of a key are ordered by ``since``, the oldest first.
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
        """Open waits by the arguments of ``on``, the oldest first."""

    def on(self, whom: str, what: str, *, idle: bool = False) -> Await:
        """Returns a new wait, which its ``with`` opens. A wait that is open must not be opened again."""
        return Await(self, (whom, what, idle))

    def records(self) -> list[Wait]:
        """A record of the oldest wait for each set of arguments of ``on``, the oldest first."""
        with self.lock:
            now = self.now()
            oldest = [(next(iter(waits)).since, key) for key, waits in self.open.items()]
        oldest.sort()
        return [Wait(whom, what, now - since, idle) for since, (whom, what, idle) in oldest]


def longest_waits(records: list[Wait]) -> list[Wait]:
    """Returns at most MOST_RECORDS of ``records``, the oldest first. Idle waits are dropped before any other."""
    kept = sorted(records, key=lambda record: (record.idle, -record.seconds))[:MOST_RECORDS]
    return sorted(kept, key=lambda record: -record.seconds)

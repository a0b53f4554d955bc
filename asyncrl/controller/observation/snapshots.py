"""Snapshots of the run: when one is taken, and who gets it: those who watch, and the recording.

While nobody watches, snapshots are taken only as often as they are recorded, and none where none is. Each is encoded
once. Invariant: the snapshot that answers a viewer is never older than SNAPSHOT_S when it asks for the first time, and
never the one it has seen.

A viewer that asks need not read: ZeroMQ's queue of a connection grows with each answer. So a viewer has to show that it
has read the last one, by its number, which nobody can guess; otherwise it waits for the next one, twice as long each
time; the last one of the run it gets in any case. Invariant: in a time T a connection is given, beyond those that it
has read and the last, at most 2 + log2(T / SNAPSHOT_S).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec

from asyncrl.messages.monitor import SnapshotTaken, WatchSnapshot
from asyncrl.runtime.calls.handlers import Caller, Connection
from asyncrl.runtime.parking import ParkingLot
from asyncrl.snapshot import Snapshot

SNAPSHOT_S = 0.5
"""Shortest time between two snapshots that nothing but time calls for."""
WATCHED_S = 15.0
"""Time after its last request for which a viewer counts as watching."""
LARGEST_STEP = 1 << 20
"""Largest step from one number to the next. Half of it twice a second takes two years to where a successor begins."""


@dataclass(slots=True)
class Given:
    """Snapshots that one connection was given and has not shown to have read. Pure: the caller brings the time (s)."""

    unread: list[int] = field(default_factory=list)
    """Numbers of the snapshots, ascending."""
    last: float = 0.0
    """Time at which the newest of them was given."""

    def heard(self, seen: int) -> None:
        """The viewer has seen the snapshot of this number, and with it those that were given before."""
        if seen in self.unread:
            del self.unread[: self.unread.index(seen) + 1]

    def may_have_more(self, now: float) -> bool:
        """Whether the viewer is given one more."""
        return not self.unread or now - self.last >= SNAPSHOT_S * 2.0 ** (len(self.unread) - 1)

    def give(self, number: int, now: float) -> None:
        """The viewer gets the snapshot of this number."""
        self.unread.append(number)
        self.last = now


class Snapshots:
    """The snapshots of a run. ``take`` makes one; ``record`` is given each that is due to be kept, encoded, every
    ``record_s``: with None only those that somebody else has taken for it; ``failed`` is given the error that one could
    not be made for: then the one before is the newest."""

    def __init__(
        self,
        take: Callable[[], Awaitable[Snapshot]],
        record: Callable[[float, bytes], None],
        failed: Callable[[Exception], None],
        *,
        record_s: float | None,
        number: int,
        now: Callable[[], float],
    ) -> None:
        """``number`` is above all that an earlier controller has given."""
        self._take, self._record, self._record_s, self._now = take, record, record_s, now
        self._failed = failed
        self._encoder = msgspec.msgpack.Encoder()
        self._viewers = ParkingLot()
        self._given: WeakKeyDictionary[Connection, Given] = WeakKeyDictionary()
        self._number = number
        self._newest = b""
        self._at = -math.inf
        self._asked = -math.inf
        self._recorded = -math.inf
        self._is_last = False
        """Whether the run is over with the newest."""
        self._wanted = asyncio.Event()
        self._taking = asyncio.Lock()
        self.taken = 0
        """Number of snapshots that were taken."""
        self.bytes = 0
        """Size of the newest."""
        self.take_s = 0.0
        """Time that it took to make the newest."""

    async def run(self) -> None:
        """Take snapshots until cancelled."""
        while True:
            due = self._record_due
            if self._is_watched:
                due = min(due, self._at + SNAPSHOT_S)
            self._wanted.clear()
            try:
                async with asyncio.timeout(None if due == math.inf else max(0.0, due - self._now())):
                    await self._wanted.wait()
                continue
            except TimeoutError:
                await self.take(record=self._now() >= self._record_due)

    async def watch(self, request: WatchSnapshot, caller: Caller) -> SnapshotTaken:
        """Answer a viewer, once there is another snapshot than it has seen or its time is over."""
        was_watched = self._is_watched
        self._asked = self._now()
        if not was_watched:
            self._wanted.set()
        given = self._given.setdefault(caller.connection, Given())
        given.heard(request.seen)
        park_s = caller.park_s
        if given.may_have_more(self._now()) and request.seen != self._number and self._now() - self._at > SNAPSHOT_S:
            async with self._taking:
                if self._now() - self._at > SNAPSHOT_S:
                    await self._take_one(record=False)

        def news() -> SnapshotTaken | None:
            now = self._now()
            if not self._newest or self._number == request.seen:
                return None
            if not given.may_have_more(now) and not (self._is_last and self._number not in given.unread):
                return None
            given.give(self._number, now)
            return SnapshotTaken(number=self._number, snapshot=self._newest)

        # A viewer cannot have seen a snapshot that it has not got.
        return await self._viewers.until(news, park_s) or SnapshotTaken(number=request.seen)

    async def take(self, *, record: bool = False, last: bool = False) -> None:
        """Take one now, and keep it if it is to be recorded. After the last one there are no others."""
        async with self._taking:
            self._is_last = last
            await self._take_one(record=record)

    async def _take_one(self, *, record: bool) -> None:
        began = self._now()
        try:
            snapshot = await self._take()
            self._newest = self._encoder.encode(snapshot)
        except Exception as error:
            # Nobody who watches ends a run, however odd the words of an actor.
            self._at = self._now()
            # Both times as if it had been taken, or the next try would come at once.
            self._recorded = self._at if record else self._recorded
            self._failed(error)
            return
        self._number += 1 + secrets.randbelow(LARGEST_STEP)
        self._at = self._now()
        self.taken += 1
        self.bytes, self.take_s = len(self._newest), self._at - began
        self._viewers.wake()
        if record:
            self._recorded = self._at
            self._record(snapshot.wall, self._newest)

    @property
    def _record_due(self) -> float:
        return math.inf if self._record_s is None else self._recorded + self._record_s

    @property
    def _is_watched(self) -> bool:
        return self._now() - self._asked < WATCHED_S

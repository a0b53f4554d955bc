"""Takes snapshots of the run when viewers or the recording need one, and sends them to viewers.

Without viewers, snapshots are taken only for the recording. Each is encoded once. Invariant: a viewer's first snapshot
is at most SNAPSHOT_S old, and a viewer never gets the one that it has.

A viewer may ask without reading, and ZeroMQ's queue of its connection would grow. So a viewer confirms the last
snapshot by its number, which is random. Without that it waits twice as long each time. It gets the last snapshot of the
run in any case. Invariant: in a time T a connection gets, besides those it has confirmed and the last one, at most
2 + log2(T / SNAPSHOT_S) snapshots.
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
"""Shortest time between two snapshots (s)."""
WATCHED_S = 15.0
"""Time after its last request in which a viewer counts as watching (s)."""
LARGEST_STEP = 1 << 20
"""Largest step from one number to the next. A restarted controller begins two years of steps higher."""


@dataclass(slots=True)
class Given:
    """Snapshots sent on one connection and not confirmed. Pure: the caller brings the time (s)."""

    unread: list[int] = field(default_factory=list)
    """Numbers of the snapshots, ascending."""
    last: float = 0.0
    """Time at which the newest of them was sent."""

    def heard(self, seen: int) -> None:
        """The viewer confirms the snapshot of this number and those before it."""
        if seen in self.unread:
            del self.unread[: self.unread.index(seen) + 1]

    def may_have_more(self, now: float) -> bool:
        """Whether the viewer may get one more."""
        return not self.unread or now - self.last >= SNAPSHOT_S * 2.0 ** (len(self.unread) - 1)

    def give(self, number: int, now: float) -> None:
        """The viewer gets the snapshot of this number."""
        self.unread.append(number)
        self.last = now


class Snapshots:
    """The snapshots of a run. ``take`` makes one. ``record`` gets an encoded one every ``record_s``, or with None only
    on request. ``failed`` gets the error of a snapshot that could not be made; the previous one then stays."""

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
        """``number`` is above all numbers of earlier controllers."""
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
        """Answer a viewer once there is a new snapshot, or when its time is over."""
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

        # A viewer cannot confirm a snapshot that it does not have.
        return await self._viewers.until(news, park_s) or SnapshotTaken(number=request.seen)

    async def take(self, *, record: bool = False, last: bool = False) -> None:
        """Take one now; ``record`` it, and take none after the ``last``."""
        async with self._taking:
            self._is_last = last
            await self._take_one(record=record)

    async def _take_one(self, *, record: bool) -> None:
        began = self._now()
        try:
            snapshot = await self._take()
            self._newest = self._encoder.encode(snapshot)
        except Exception as error:
            # A snapshot that fails never ends the run.
            self._at = self._now()
            # As if it had been taken: the next try waits.
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

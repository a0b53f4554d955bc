"""When a snapshot of the run is taken, and who gets it: those who watch, and the recording.

While nobody watches, snapshots are taken only as often as they are recorded, and none where none is. Each is encoded
once. Invariant: what a viewer is answered is never older than SNAPSHOT_S when it asks for the first time, and never the
one it has seen.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import msgspec

from asyncrl.messages.monitor import SnapshotTaken, WatchSnapshot
from asyncrl.runtime.parking import ParkingLot
from asyncrl.snapshot import Snapshot

SNAPSHOT_S = 0.5
"""Shortest time between two snapshots that nothing but time calls for."""
WATCHED_S = 15.0
"""Who has not asked for longer does not watch any more."""


class Snapshots:
    """``take`` makes one; ``record`` is given each that is due to be kept, encoded, every ``record_s``: with None only
    those that somebody else has taken for it.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[Snapshot]],
        record: Callable[[float, bytes], None],
        *,
        record_s: float | None,
        number: int,
        now: Callable[[], float],
    ) -> None:
        """``number`` is above all that an earlier controller has given."""
        self._take, self._record, self._record_s, self._now = take, record, record_s, now
        self._encoder = msgspec.msgpack.Encoder()
        self._viewers = ParkingLot()
        self._number = number
        self._newest = b""
        self._at = -math.inf
        self._asked = -math.inf
        self._recorded = -math.inf
        self._wanted = asyncio.Event()
        self._taking = asyncio.Lock()
        self.taken = 0
        """So many were."""
        self.bytes = 0
        """Size of the newest."""
        self.take_s = 0.0
        """What it took to make the newest."""

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

    async def watch(self, request: WatchSnapshot, park_s: float) -> SnapshotTaken:
        """Answer a viewer, once there is another snapshot than it has seen or its time is over."""
        was_watched = self._is_watched
        self._asked = self._now()
        if not was_watched:
            self._wanted.set()
        if request.seen != self._number and self._now() - self._at > SNAPSHOT_S:
            async with self._taking:
                if self._now() - self._at > SNAPSHOT_S:
                    await self._take_one(record=False)

        def news() -> SnapshotTaken | None:
            fresh = self._newest and self._number != request.seen
            return SnapshotTaken(number=self._number, snapshot=self._newest) if fresh else None

        return await self._viewers.until(news, park_s) or SnapshotTaken(number=self._number)

    async def take(self, *, record: bool = False) -> None:
        """Take one now, and keep it if it is to be recorded."""
        async with self._taking:
            await self._take_one(record=record)

    async def _take_one(self, *, record: bool) -> None:
        began = self._now()
        snapshot = await self._take()
        self._newest = self._encoder.encode(snapshot)
        self._number += 1
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

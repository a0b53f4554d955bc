"""The parameter server: takes publications, holds the newest versions, and conducts how replicas take them over.

The learner waits for nothing here but that its segments are held. Replicas ask; their calls are parked and answered
by events, never polled.
"""

from __future__ import annotations

import asyncio

from asyncrl.messages import (
    Done,
    NextUpdate,
    PauseGranted,
    Publish,
    ReportUpdate,
    RequestPause,
    Update,
)
from asyncrl.parameter_server.conductor import Conductor
from asyncrl.parameter_server.snapshots import Snapshot, hold
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.runtime.parking import ParkingLot


class ParameterServer(Actor):
    """See the module."""

    role = "parameter_server"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        weights = self.config.weights
        self._conductor = Conductor(max_paused_fraction=weights.max_paused_fraction, deadline_s=weights.deadline_s)
        self._snapshots: dict[int, Snapshot] = {}
        self._published = ParkingLot()
        self._pause_freed = ParkingLot()

    async def close(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.release()
        self._snapshots.clear()

    def peer_replaced(self, name: str, incarnation: int) -> None:
        """A dead replica stages nothing and pauses for nothing."""
        self._conductor.left(name, incarnation)
        self._release_unneeded()
        self._pause_freed.wake()

    @handler
    def publish(self, request: Publish, caller: Caller) -> Done:
        """A new version; repeated with the same number it is acknowledged again."""
        version = request.manifest.version
        if version == self._conductor.newest:
            return Done()
        snapshot = hold(request.manifest)
        self._conductor.published(version)
        self._snapshots[version] = snapshot
        self.param_version = version
        self._release_unneeded()
        self.progress()
        self.log.info("published", version=version, gather_s=request.gather_s, publisher=caller.name)
        self._published.wake()
        return Done()

    @handler
    async def next_update(self, request: NextUpdate, caller: Caller) -> Update:
        """Parked until there is something newer than what the replica serves."""

        def offer() -> int | None:
            return self._conductor.offer(caller.name, caller.incarnation, request.serving)

        version = await self._published.until(offer, caller.park_s)
        # Whoever asks this has nothing staged and nothing paused any more.
        self._release_unneeded()
        self._pause_freed.wake()
        return Update(manifest=None if version is None else self._snapshots[version].manifest)

    @handler
    async def request_pause(self, request: RequestPause, caller: Caller) -> PauseGranted:
        """Parked until the replica may pause."""

        def ask() -> bool | None:
            now = asyncio.get_running_loop().time()
            return self._conductor.ask_pause(caller.name, caller.incarnation, request.version, now) or None

        return PauseGranted(granted=bool(await self._pause_freed.until(ask, caller.park_s)))

    @handler
    def report_update(self, request: ReportUpdate, caller: Caller) -> Done:
        """The end of an update frees its pause for the next replica."""
        self._conductor.ended(caller.name, caller.incarnation, request.version, committed=request.committed)
        self._release_unneeded()
        self._pause_freed.wake()
        self.progress()
        if request.committed:
            self.log.info("committed", replica=caller.name, version=request.version, stall_s=request.times.stall_s)
        else:
            self.log.warning("update failed", replica=caller.name, version=request.version, error=request.error)
        return Done()

    def _release_unneeded(self) -> None:
        needed = self._conductor.needed()
        for version in [v for v in self._snapshots if v not in needed]:
            self._snapshots.pop(version).release()


ACTOR = ParameterServer

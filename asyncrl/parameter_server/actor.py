"""The parameter server: takes publications, holds the newest versions, and conducts how replicas take them over.

The learner waits here only until its segments are held. Replicas ask; their calls are parked and answered
by events, never polled. All decisions are the conductor's: here are its sockets, clock, segments and log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from asyncrl.errors import VersionGone, WeightsCorrupt
from asyncrl.messages import Done
from asyncrl.messages.weights import (
    Announce,
    Announced,
    BroadcastBegins,
    BroadcastEnded,
    Chunk,
    FetchChunk,
    JoinBroadcast,
    KeepPublished,
    NextUpdate,
    PauseGranted,
    Publish,
    Published,
    ReportUpdate,
    RequestPause,
    Update,
)
from asyncrl.parameter_server.conductor import Conductor
from asyncrl.parameter_server.held import HeldVersions
from asyncrl.parameter_server.offers import manifest_for, shared_manifest
from asyncrl.parameter_server.snapshots import hold
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.runtime.lifecycle.incarnations import numbers_begin_above
from asyncrl.runtime.parking import AT_ONCE, ParkingLot
from asyncrl.weights.segments import host_id

T = TypeVar("T")

COMPARED_VERSIONS = 16
"""Versions whose checksums are kept for replicas that come to them late."""


class ParameterServer(Actor):
    """The actor of the parameter server; its conductor decides."""

    role = "parameter_server"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._conductor = Conductor(self.config.weights, first_epoch=numbers_begin_above(context.incarnation) + 1)
        self._held = HeldVersions()
        self._lots: dict[str, ParkingLot] = {}
        """Parked question of each caller."""
        self._checksums: dict[int, str] = {}
        """Checksum of the first engine that took a version over, by version, in the order of coming."""
        self._condemned = ParkingLot()
        """The learner's parked call, for as long as all that it has published is whole."""
        self._suspect = asyncio.Event()
        """Set when a replica has found the newest version corrupt."""
        self._accepted = asyncio.Event()
        """Set when a version waits for its deltas."""
        self._sooner = asyncio.Event()
        """Set when the conductor's deadline is before the one waited for."""
        self._timer: float | None = None

    async def run(self) -> None:
        self.tasks.create_task(self._keep_time(), name="keep_time")
        self.tasks.create_task(self._verify_suspects(), name="verify_suspects")
        if self.config.weights.delta:
            self.tasks.create_task(self._encode_deltas(), name="encode_deltas")
        await self.drained()

    async def close(self) -> None:
        await self._held.close()

    def peer_died(self, name: str, incarnation: int) -> None:
        """Take a dead actor out: it stages nothing, pauses for nothing, and takes part in nothing."""
        self._conductor.left(name, incarnation, self._now())
        self._changed()

    # --- the learner ---

    @handler
    def publish(self, request: Publish, caller: Caller) -> Done:
        """Take a new version; repeated with the same number it is acknowledged again. Raises VersionReused."""
        version = request.manifest.version
        if not self._conductor.publications.is_new(version):
            return Done()
        # The version is held first: where a segment cannot be opened its number is not taken.
        self._held.add(hold(request.manifest))
        self._conductor.publications.accept(version)
        self.param_version = version
        self.progress()
        self.log.info("published", version=version, gather_s=request.gather_s, publisher=caller.name)
        # The first version here has no base to be encoded against.
        if self.config.weights.delta and self._conductor.publications.newest >= 0:
            self._accepted.set()
        else:
            self._conductor.publications.publish(version)
        self._changed()
        return Done()

    @handler
    async def keep_published(self, request: KeepPublished, caller: Caller) -> Published:
        """Park the call while the version, or a newer one, is held and whole."""

        def lost() -> Published | None:
            corrupt = request.version <= self._conductor.publications.condemned
            held = request.version <= self._conductor.publications.accepted and not corrupt
            return None if held else Published(held=False, corrupt=corrupt)

        return await self._condemned.until(lost, caller.park_s) or Published(held=True)

    @handler
    async def announce(self, request: Announce, caller: Caller) -> Announced:
        """Park the call until the members are paused, or there will be no broadcast."""
        number = self._conductor.announce(caller.name, caller.incarnation, request, self._now())
        found = await self._parked(caller, number, lambda: self._conductor.broadcasts.decided(request.version))
        return found or Announced(decided=False)

    @handler
    def broadcast_ended(self, request: BroadcastEnded, caller: Caller) -> Done:
        """End the broadcast; with an error it is over for all who have not committed."""
        self.log.info("broadcast sent", version=request.version, epoch=request.epoch, error=request.error)
        self._conductor.broadcast_ended(request.version, request.epoch, request.error, self._now(), again=request.again)
        self._changed()
        return Done()

    # --- replicas ---

    @handler
    async def next_update(self, request: NextUpdate, caller: Caller) -> Update:
        """Park the call until there is a newer version than the one that the replica serves."""
        number = self._conductor.next_update(
            caller.name,
            caller.incarnation,
            serving=request.serving,
            same_host=request.host == host_id(),
            host=request.host,
            workers=request.workers,
            on_gpu=request.on_gpu,
            now=self._now(),
        )
        offer = await self._parked(caller, number, lambda: self._conductor.offer(caller.name, self._now()))
        if offer is None or offer.collective is not None:
            return Update(offer=offer)
        held = self._held.manifest(offer.version)
        paths = self._conductor.fleet.replicas[caller.name].source_paths
        manifest = shared_manifest(held, paths) if paths else manifest_for(held, offer.transport, request.base)
        return Update(offer=msgspec.structs.replace(offer, manifest=manifest))

    @handler
    def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        """Bytes of a held version. Raises VersionGone, InvalidRequest."""
        chunk = self._held.chunk(request)
        self.counters.add("weights/chunks_served")
        self.counters.add("weights/bytes_served", request.size)
        self.progress()
        return chunk

    @handler
    async def request_pause(self, request: RequestPause, caller: Caller) -> PauseGranted:
        """Park the call until the replica may pause."""
        version = request.version
        number = self._conductor.request_pause(
            caller.name, caller.incarnation, version, self._now(), paths=request.paths
        )
        granted = await self._parked(caller, number, lambda: self._conductor.may_pause(caller.name, version))
        return PauseGranted(granted=granted is True)

    @handler
    async def join_broadcast(self, request: JoinBroadcast, caller: Caller) -> BroadcastBegins:
        """Park the call until all members are paused, or the broadcast is called off."""
        version, epoch = request.version, request.epoch
        number = self._conductor.join(caller.name, caller.incarnation, version, epoch, self._now())
        begins = await self._parked(caller, number, lambda: self._conductor.begins(caller.name, version, epoch))
        return BroadcastBegins(decided=begins is not None, begins=begins is True)

    @handler
    def report_update(self, request: ReportUpdate, caller: Caller) -> Done:
        """Take the end of an update, which frees its pause for the next replica."""
        counted = self._conductor.report(
            caller.name,
            caller.incarnation,
            request.version,
            committed=request.committed,
            error=request.error,
            broke_off=request.broke_off,
            epoch=request.epoch,
            now=self._now(),
        )
        if request.committed and request.times.checksum:
            self._compare(caller.name, request)
        if counted:
            facts = {"replica": caller.name, "version": request.version, "transport": request.times.transport}
            if request.committed:
                self.log.info("committed", stall_s=request.times.stall_s, **facts)
            else:
                # A broken broadcast is one warning, and not one for each of its members.
                tell = self.log.info if request.broke_off else self.log.warning
                tell("update failed", error=request.error, **facts)
        if (
            request.corrupt
            and request.version == self._conductor.publications.newest > self._conductor.publications.condemned
        ):
            self._suspect.set()
        self.progress()
        self._changed()
        return Done()

    def _compare(self, name: str, request: ReportUpdate) -> None:
        """Compare checksums: all engines hold the same weights after the same update."""
        if self._checksums.setdefault(request.version, request.times.checksum) != request.times.checksum:
            self.counters.add("weights/engines_differ")
            self.log.error("engines hold different weights", replica=name, version=request.version)
        if len(self._checksums) > COMPARED_VERSIONS:
            del self._checksums[next(iter(self._checksums))]

    # --- the conductor's clock and effects ---

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _parked(self, caller: Caller, number: int, answer: Callable[[], T | None]) -> T | None:
        """The answer; None for "ask again", when the time is over or the caller has asked something else since."""

        def ask() -> tuple[T | None] | None:
            if not self._conductor.fleet.asks(caller.name, number):
                return (None,)
            found = answer()
            return None if found is None else (found,)

        self._changed()
        lot = self._lots.setdefault(caller.name, ParkingLot())
        try:
            found = await lot.until(ask, caller.park_s)
        except asyncio.CancelledError:
            self._conductor.withdrew(caller.name, number, self._now())
            self._changed()
            raise
        self._conductor.answered(caller.name, number, self._now())
        self._changed()
        return None if found is None else found[0]

    def _changed(self) -> None:
        """Do the work that follows from a change in the conductor."""
        effects = self._conductor.fleet.take_effects()
        for note in effects.notes:
            getattr(self.log, note.level)(note.event, **note.facts)
        self._wake(list(effects.wake))
        publications = self._conductor.publications
        if not publications.kept().issuperset(self._held.versions):
            # Only then is it worth a look at all replicas that fetch.
            self._held.keep(publications.needed())
        self.counters.update({f"weights/{name}": value for name, value in self._conductor.figures().items()})
        deadline = self._conductor.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._sooner.set()

    def _wake(self, names: list[str]) -> None:
        """Let callers ask again, in each turn of the event loop those of one lot: a broadcast is for all at once."""
        for name in names[:AT_ONCE]:
            if name in self._lots:
                self._lots[name].wake()
        if len(names) > AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, names[AT_ONCE:])

    async def _keep_time(self) -> None:
        """Let the conductor know when its deadlines are over."""
        while True:
            self._sooner.clear()
            self._timer = self._conductor.next_deadline()
            try:
                async with asyncio.timeout_at(self._timer):
                    await self._sooner.wait()
            except TimeoutError:
                self._conductor.pass_time(self._now())
                self._changed()

    async def _verify_suspects(self) -> None:
        """Verify suspected versions: a reader may err, but a version that is not as it was sealed is published anew."""
        while True:
            await self._suspect.wait()
            self._suspect.clear()
            version = self._conductor.publications.newest
            if version <= self._conductor.publications.condemned:
                continue
            try:
                await self._held.verify(version)
            except WeightsCorrupt as error:
                self.log.error("version is condemned", version=version, error=str(error))
                self._conductor.publications.condemn(version)
                self._condemned.wake()
            except VersionGone:
                self.log.info("suspect version is gone", version=version)

    async def _encode_deltas(self) -> None:
        """Encode a version's deltas before replicas are told of it; one that cannot have them goes without."""
        while True:
            await self._accepted.wait()
            self._accepted.clear()
            # A version that was overtaken while another was encoded is offered to nobody.
            version = self._conductor.publications.accepted
            try:
                await self._held.encode(version, base=self._conductor.publications.newest)
            except (OSError, VersionGone) as error:
                self.log.warning("no deltas", version=version, error=str(error))
            self._conductor.publications.publish(version)
            self._changed()

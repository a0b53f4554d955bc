"""The parameter server: takes versions from the learner, holds the newest ones, and directs how replicas load them.

A publication is answered once its segments are held. Questions are parked until an event, or the end of the parking
time, answers them. The conductor (conductor.py) makes all decisions; this module has its sockets, clock, segments and
log.

A chunk is a view of the segment's own memory, which ZeroMQ sends without a copy. Its checksum is computed for the first
request and remembered, because several replicas request the same chunks at about the same time. Each version is closed
exactly once: when it is no longer needed, or at the end. A version is condemned if its bytes here have changed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from asyncrl.core.errors import InvalidRequest, VersionGone, WeightsCorrupt
from asyncrl.messages import Done, Message
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    Chunk,
    FetchChunk,
    NextUpdate,
    Publish,
    Published,
    ReportSleep,
    ReportUpdate,
    RequestLoad,
    WatchBroadcast,
    WatchPublished,
)
from asyncrl.parameter_server.conductor import Conductor
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.linux import host_id
from asyncrl.rpc.parking_lot import AT_ONCE, ParkingLot
from asyncrl.weights.held_version import HeldVersion, hold

COMPARED_VERSIONS = 16
"""Number of versions whose engine checksums are kept, for replicas that load them late."""
MAX_CHECKSUMS = 65536
"""Number of chunk checksums that are kept, the newest: a few MiB, for 256 GiB in chunks of 4 MiB."""


class ParameterServer(Actor):
    """The actor of the parameter server."""

    role = "parameter_server"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._conductor = Conductor(self.config.weights, first_epoch=numbers_begin_above(context.incarnation) + 1)
        self._held = HeldVersions()
        self._lots: defaultdict[str, ParkingLot] = defaultdict(ParkingLot)
        """The parked call of each caller, by name."""
        self._checksums: dict[int, str] = {}
        """Checksum that the first engine reported for a version, by version, in order of the first reports."""
        self._parked_watch = ParkingLot()
        """The learner's parked ``watch_published``; woken when a version is condemned."""
        self._suspect = -1
        """The version that a replica has found corrupt and that is verified here now; -1 for none."""
        self._changed = asyncio.Event()
        """Set after a change in the conductor, which may have moved its next deadline."""

    async def run(self) -> None:
        self.tasks.create_task(self._keep_time(), name="keep_time")
        await self.drained()

    async def close(self) -> None:
        await self._held.close()

    def peer_died(self, name: str, incarnation: int) -> None:
        """Forget a dead actor, which ends its staging, its pause and its part in a broadcast."""
        self._conductor.left(name, incarnation, self._now())
        self._apply_effects()

    # --- the learner ---

    @handler
    async def publish(self, request: Publish, caller: Caller) -> Done:
        """Hold a new version and assign it to replicas; a repeat changes nothing.

        Raises VersionReused, and WeightsCorrupt as ``hold``. It is a coroutine, as ``ask`` is: both run as tasks, so it
        cannot overtake the announcement that came before it.
        """
        manifest = request.manifest
        if not self._conductor.is_new(manifest.version):
            return Done()
        # The version is held first: if a segment cannot be opened, its number stays free.
        held = self._held.by_number[manifest.version] = hold(manifest)
        self._conductor.publish(held.manifest)
        self.param_version = manifest.version
        self.progress()
        self.log.info("published", version=manifest.version, gather_s=manifest.gather_s, publisher=caller.name)
        self._apply_effects()
        return Done()

    @handler
    async def watch_published(self, request: WatchPublished, caller: Caller) -> Published:
        """Park the call as long as the version, or a newer one, is held and neither it nor a newer one is condemned.

        At the end of the parking time the answer is that it is held: ask again.
        """

        def lost() -> Published | None:
            """The answer if the version is lost; None to wait."""
            corrupt = request.version <= self._conductor.condemned
            held = request.version <= self._conductor.newest and not corrupt
            return None if held else Published(held=False, corrupt=corrupt)

        return await self._parked_watch.until(lost, caller.park_s) or Published(held=True)

    # --- questions for the conductor ---

    @handler
    async def ask(
        self, request: AnnounceBroadcast | WatchBroadcast | NextUpdate | RequestLoad, caller: Caller
    ) -> Message:
        """Pass a request to the conductor as a question, and park the call until the question has an answer.

        An announcement waits until all members are paused for the broadcast, unless this is declined or called off. A
        watch waits until the broadcast is over; with an error, it ends the broadcast for all who have not committed. A
        replica waits for a newer version than the one that it serves, and then until it may load that version.

        Returns the empty reply, which means "ask again", if the caller's parking time is over or the caller has asked
        another question since. A cancelled call withdraws the question, which ends the replica's update.
        """
        same_host = isinstance(request, NextUpdate) and request.host == host_id()
        question = self._conductor.ask(caller.name, caller.incarnation, request, self._now(), same_host=same_host)
        self._apply_effects()
        try:
            answer = await self._lots[caller.name].until(
                lambda: self._conductor.answer(question, self._now()), caller.park_s
            )
        except asyncio.CancelledError:
            self._conductor.withdrew(question, self._now())
            self._apply_effects()
            raise
        self._conductor.answered(question, self._now())
        self._apply_effects()
        return request.reply() if answer is None else answer

    # --- replicas ---

    @handler
    def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        """Return a chunk of a held version. Raises VersionGone, InvalidRequest."""
        chunk = self._held.chunk(request)
        self.counters.add("weights/chunks_served")
        self.counters.add("weights/bytes_served", request.size)
        self.progress()
        return chunk

    @handler
    def report_update(self, request: ReportUpdate, caller: Caller) -> Done:
        """Record the end of a replica's update, which frees its pause.

        If the replica found the newest version corrupt, that version is verified here.
        """
        counted = self._conductor.report(caller.name, caller.incarnation, request, self._now())
        transport, version = request.times.transport, request.version
        if request.committed and request.times.checksum:
            self._compare(caller.name, request)
        if counted:
            facts = {"replica": caller.name, "version": version, "transport": transport}
            if request.committed:
                self.log.info("committed", stall_s=request.times.stall_s, **facts)
            else:
                # The conductor warns once of a broken broadcast, so its members' failures are no warnings.
                log = self.log.info if transport in ("gloo", "nccl") else self.log.warning
                log("update failed", error=request.error, **facts)
        # Only the newest version is verified, unless it is condemned or is being verified already.
        if request.corrupt and version == self._conductor.newest > max(self._conductor.condemned, self._suspect):
            self._suspect = version
            self.tasks.create_task(self._verify(version), name="verify")
        self.progress()
        self._apply_effects()
        return Done()

    @handler
    def report_sleep(self, request: ReportSleep, caller: Caller) -> Done:
        """Record that a replica sleeps in time slices, which ends its update without a failure."""
        self._conductor.slept(caller.name, caller.incarnation, self._now())
        self.progress()
        self._apply_effects()
        return Done()

    def _compare(self, name: str, request: ReportUpdate) -> None:
        """Compare an engine's checksum with the first one of this version: all engines must hold the same weights.

        Counts and logs a difference as an error. Nothing else follows from it.
        """
        if self._checksums.setdefault(request.version, request.times.checksum) != request.times.checksum:
            self.counters.add("weights/engines_differ")
            self.log.error("engines hold different weights", replica=name, version=request.version)
        if len(self._checksums) > COMPARED_VERSIONS:
            del self._checksums[next(iter(self._checksums))]

    # --- the conductor's clock and effects ---

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _apply_effects(self) -> None:
        """Apply the effects of a change in the conductor: log, wake calls, close versions, note the time."""
        woken, notes = self._conductor.replicas.take_effects()
        for note in notes:
            getattr(self.log, note.level)(note.event, **note.facts)
        self._wake(list(woken))
        if len(self._held.by_number) > 1:
            # ``needed`` looks at all replicas that stage, so it is called only if there is a version to close.
            self._held.keep(self._conductor.needed())
        self._changed.set()

    def _wake(self, names: list[str]) -> None:
        """Wake callers, AT_ONCE in each turn of the event loop, because a broadcast wakes all members at once."""
        for name in names[:AT_ONCE]:
            self._lots[name].wake()
        if len(names) > AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, names[AT_ONCE:])

    async def _keep_time(self) -> None:
        """Task: call the conductor's ``pass_time`` at each of its deadlines."""
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._conductor.next_deadline()):
                    await self._changed.wait()
            except TimeoutError:
                self._conductor.pass_time(self._now())
                self._apply_effects()

    async def _verify(self, version: int) -> None:
        """Verify a held version, and condemn it if its bytes have changed.

        The learner then publishes its present weights as a newer version.
        """
        try:
            await self._held.verify(version)
        except WeightsCorrupt as error:
            self.log.error("version is condemned", version=version, error=str(error))
            self._conductor.condemn(version)
            self._parked_watch.wake()
        except VersionGone:
            self.log.info("suspect version is gone", version=version)
        finally:
            self._suspect = -1

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {f"weights/{name}": value for name, value in self._conductor.metrics().items()}


class HeldVersions:
    """Holds versions, and serves their chunks. Used from the event loop.

    Methods that take a version raise VersionGone if it is not held.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, HeldVersion] = {}
        """The held versions; ``keep`` closes them."""
        self._checksums: dict[FetchChunk, int] = {}
        """xxh3_64 of each chunk that was served."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="versions")
        """Threads that verify and close versions, which block."""

    def find(self, version: int) -> HeldVersion:
        """Find a held version."""
        if version not in self.by_number:
            raise VersionGone(version)
        return self.by_number[version]

    def chunk(self, request: FetchChunk) -> Chunk:
        """Return a chunk and its checksum, which blocks the first time (a millisecond for 8 MiB).

        Raises VersionGone, and InvalidRequest for an unknown bucket or bytes past the end.
        """
        content = self.find(request.version).bytes_of(request.bucket)
        end = request.offset + request.size
        if end > content.nbytes:
            raise InvalidRequest(
                f"bytes {request.offset} to {end} of bucket {request.bucket} of version {request.version}, which has "
                f"{content.nbytes}"
            )
        data = content[request.offset : end]
        checksum = self._checksums.get(request)
        if checksum is None:
            checksum = self._checksums[request] = xxhash.xxh3_64_intdigest(data)
            if len(self._checksums) > MAX_CHECKSUMS:
                del self._checksums[next(iter(self._checksums))]
        return Chunk(data=np.frombuffer(data, np.uint8), checksum=checksum)

    def keep(self, versions: Collection[int]) -> None:
        """Close the held versions that are not in ``versions``."""
        for version in self.by_number.keys() - versions:
            self._threads.submit(self.by_number.pop(version).close)

    async def verify(self, version: int) -> None:
        """Compare a version with its checksums, on threads. Raises WeightsCorrupt naming a bucket, and VersionGone."""
        held = self.find(version)
        for bucket in range(len(held.manifest.buckets)):
            await asyncio.wrap_future(self._threads.submit(held.verify, bucket))

    async def close(self) -> None:
        """Close everything."""
        self.keep(())
        await asyncio.to_thread(self._threads.shutdown)

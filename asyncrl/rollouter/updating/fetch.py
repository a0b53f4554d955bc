"""Fetches a version into sealed, verified memory of this host, and passes it on to others while it arrives.

Under ``shm`` the segments of another process of this host are opened and verified. Under ``stream`` segments of this
process are filled chunk by chunk. The chunks come from the replicas that the update names, nearest first, and at last
from the parameter server. A fetch leaves a replica for good when a call to it fails, when its bytes are wrong, and when
it is alive but no new chunk has come for IDLE_SHARE of ``weights.deadline_s``.

The relay passes on a version that this replica fetches for its host. The next host gets each chunk as soon as the chunk
is verified. The other replicas of this host open the version when it is whole. The relay keeps a version, by its own
descriptors, until a newer one is whole or committed here, even after the update has ended. It holds at most one whole
version and one that is arriving.

Invariants:

* A chunk's checksum is verified before it is written, a bucket's before it counts.
* At most ``weights.chunks_in_flight`` chunks are requested at once.
* A source that dies, or a parameter server that restarts with the same version, costs only the chunks in flight.
* Nothing stays open after a fetch that fails or is cancelled. Reading and checksums run in threads.

A fetch fails with VersionGone when the version is no longer held, and with WeightsCorrupt when its bytes are not those
that were published. It fails with DeadlineExceeded when no chunk arrives for ``weights.deadline_s`` or the fetch takes
``weights.stage_deadline_s``, and with RemoteError.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotHere,
    PeerRestarted,
    ProtocolError,
    RemoteError,
    VersionGone,
    WeightsCorrupt,
)
from asyncrl.messages import Request
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest, Source, WeightUpdate
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.calls.retry import AWAY_S, is_refusal, pause
from asyncrl.rpc.parking_lot import ParkingLot
from asyncrl.weights.held_version import HeldVersion, Segment, close_all, hold, layout_of, path_of, seal_verified

T = TypeVar("T")
Call = Callable[[str, Request, float | None], Awaitable[Any]]
"""A function that calls an actor; it gets the actor's name, the request, and the timeout (s; None: the usual one)."""

PARAMETER_SERVER = "parameter_server/0"
CORRUPT_ATTEMPTS = 3
"""The fetch fails when the same chunk has arrived corrupt so many times."""
VERIFIED_AT_ONCE = 4
"""Most buckets of shared memory that are verified at the same time. One thread reads slower than the memory. On
two cores, four threads share them more evenly than two threads do."""
SILENT_SHARE = 1 / 8
"""Share of weights.deadline_s after which an unanswered call ends and its source is left. A live source answers within
half of that time."""
IDLE_SHARE = 1 / 2
"""Share of weights.deadline_s after which a source that has no new chunk is left. It is larger than SILENT_SHARE: hosts
nearer to the parameter server must notice a dead source first, or all later hosts leave at once."""


async def fetch(
    update: WeightUpdate, *, call: Call, weights: WeightsConfig, who: str = "rollouter", relay: Relay | None = None
) -> HeldVersion:
    """Fetch the version of an update by shm or stream, and return it verified. The caller closes it.

    ``who`` is the fetching actor, for logs and errors; ``relay`` gets each chunk of a stream.
    """
    assert update.manifest is not None, "a broadcast is not fetched"
    layout_of(update.manifest)
    fetching: _Stream | _Shared
    if update.transport == "stream":
        fetching = _Stream(update, update.manifest, weights, who, call, relay)
    else:
        fetching = _Shared(update.manifest)
    try:
        async with asyncio.timeout(weights.stage_deadline_s) as limit:
            return await fetching.run()
    except TimeoutError as error:
        if not limit.expired():
            raise
        progress = _progress(fetching.bytes, update.manifest)
        what = f"all of version {update.version} by {update.transport} (weights.stage_deadline_s; {progress})"
        raise DeadlineExceeded(who, fetching.source, what, weights.stage_deadline_s) from error


def _progress(count: int, manifest: Manifest) -> str:
    return f"{count} of {manifest.bytes} bytes are here"


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` on a thread. A cancellation waits for the thread, because the caller closes its objects next."""
    running = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue
        # Retrieves the exception, which asyncio would otherwise log.
        running.exception()
        raise


class _Shared:
    """A fetch that opens and verifies the memory of a process on this host.

    A cancellation takes effect once the present buckets are verified.
    """

    source = PARAMETER_SERVER
    """The actor that errors name; the memory may be that of another replica."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.bytes = 0
        """Number of verified bytes."""

    async def run(self) -> HeldVersion:
        held, limit = self._open(), asyncio.Semaphore(VERIFIED_AT_ONCE)

        async def verify(index: int) -> None:
            async with limit:
                await _in_thread(held.verify, index)
            self.bytes += self._manifest.buckets[index].size

        try:
            # Each result is awaited, errors too: the version may only be closed when no thread reads it any more.
            results = await asyncio.gather(*map(verify, range(len(held.descriptors))), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            await _in_thread(held.close)
            raise
        return held

    def _open(self) -> HeldVersion:
        try:
            return hold(self._manifest)
        except WeightsCorrupt as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESRCH, errno.ENXIO):
                # The process that held the memory has died, or has closed it.
                raise VersionGone(self._manifest.version, str(error)) from error
            raise


class _Stream:
    """A fetch over the wire, chunk by chunk."""

    def __init__(
        self,
        update: WeightUpdate,
        manifest: Manifest,
        weights: WeightsConfig,
        who: str,
        call: Call,
        relay: Relay | None,
    ) -> None:
        self._manifest, self._version, self._buckets = manifest, manifest.version, manifest.buckets
        self._weights, self._who, self._call, self._relay = weights, who, call, relay
        self._log = get_logger(who)
        self._sealed: dict[int, int] = {}
        """Descriptors of the buckets that are complete, sealed and verified, by index."""
        self.bytes = 0
        """Number of bytes that have arrived, were verified and are written."""
        self._sources = [*update.sources, Source(PARAMETER_SERVER, 0)]
        """The source in use, then those to try after it."""
        self._last_progress = self._now()
        """Time when a chunk last arrived, or the source changed."""
        self._chunks = self._cut()
        """Chunks still to be requested."""
        self._missing_bytes = {index: bucket.size for index, bucket in enumerate(self._buckets)}
        """Number of bytes of each bucket that have not arrived."""
        self._filling: dict[int, Segment] = {}
        """Memory of the buckets that are not complete, by bucket."""
        self._limit: asyncio.Timeout
        """Deadline of the next chunk; each chunk that arrives moves it."""
        self._last_failure = ""
        """The parameter server's last error since a chunk last arrived; "" without one."""
        self._draws = random.Random(f"{who} {self._version}")
        """Random numbers for the pauses after failures."""

    @property
    def source(self) -> str:
        return self._sources[0].name

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _cut(self) -> Iterator[FetchChunk]:
        for index, bucket in enumerate(self._buckets):
            for offset in range(0, bucket.size, self._weights.chunk_bytes):
                size = min(self._weights.chunk_bytes, bucket.size - offset)
                yield FetchChunk(version=self._version, bucket=index, offset=offset, size=size)

    async def run(self) -> HeldVersion:
        """Fetch all chunks with several tasks, and return the version.

        ``weights.deadline_s`` counts from the last chunk that arrived. Raises as the module says.
        """
        deadline_s = self._weights.deadline_s
        try:
            async with asyncio.timeout(deadline_s) as self._limit, asyncio.TaskGroup() as tasks:
                for _ in range(self._weights.chunks_in_flight):
                    tasks.create_task(self._fetch_chunks())
            sealed, self._sealed = self._sealed, {}
            return HeldVersion(self._manifest, [sealed[index] for index in range(len(self._buckets))])
        except BaseExceptionGroup as group:
            # Callers need the class of the error; the first one has ended the other tasks.
            raise group.exceptions[0] from None
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            what = f"chunks of version {self._version} ({_progress(self.bytes, self._manifest)})"
            raise DeadlineExceeded(self._who, self.source, what, deadline_s, self._last_failure) from error
        finally:
            # By now no task or thread writes any more.
            if self._filling or self._sealed:
                await _in_thread(self._discard)

    def _discard(self) -> None:
        """Free the memory of all buckets, complete or not; runs on a thread."""
        while self._filling:
            self._filling.popitem()[1].discard()
        close_all(list(self._sealed.values()))

    async def _fetch_chunks(self) -> None:
        """Fetch chunks until none is left; several tasks run this. Each requests a chunk until it arrives verified.

        Raises WeightsCorrupt if a chunk arrives corrupt CORRUPT_ATTEMPTS times.
        """
        for request in self._chunks:
            corrupt, is_missing = 0, True
            while is_missing:
                source = self._sources[0]
                try:
                    await self._fetch_chunk(request, source)
                    is_missing = False
                except ProtocolError as error:
                    corrupt += 1
                    self._leave(source.name, str(error))
                    where = {"version": self._version, "bucket": request.bucket}
                    self._log.warning("chunk is corrupt", offset=request.offset, error=str(error), **where)
                    if corrupt == CORRUPT_ATTEMPTS:
                        what = f"its chunk at {request.offset} arrived corrupt {corrupt} times: {error}"
                        raise WeightsCorrupt(what, **where) from error
                except (DeadlineExceeded, PeerRestarted, RemoteError) as error:
                    await self._handle_failure(source.name, error)

    async def _fetch_chunk(self, request: FetchChunk, source: Source) -> None:
        """Fetch, verify and write a chunk, pass it on to the relay, and seal its bucket after the last one.

        Raises ProtocolError for a corrupt chunk, and as a call does.
        """
        # The parameter server gets the whole deadline, because a repeated call would queue the chunk again.
        timeout_s = self._weights.deadline_s * (1 if source.name == PARAMETER_SERVER else SILENT_SHARE)
        # The turn names one fetch of the source, which refuses if it has begun another (_Held.turn).
        asked = msgspec.structs.replace(request, turn=source.turn)
        chunk: Chunk = await self._call(source.name, asked, timeout_s)
        index = request.bucket
        if index not in self._filling:
            self._filling[index] = Segment("asyncrl-weights", self._buckets[index].size)
        await _in_thread(_write, self._filling[index], request, chunk)
        self.bytes += request.size
        self._missing_bytes[index] -= request.size
        if self._relay is not None:
            self._relay.arrived(request, self._filling[index].fd, chunk.checksum)
        if not self._missing_bytes[index]:
            await _in_thread(self._seal, index)
        self._last_failure, self._last_progress = "", self._now()
        # A timeout that has expired cannot be rescheduled.
        if not self._limit.expired():
            self._limit.reschedule(self._last_progress + self._weights.deadline_s)

    async def _handle_failure(self, source: str, error: DeadlineExceeded | PeerRestarted | RemoteError) -> None:
        """Handle a failed call: leave the source, pause before the next call, or raise an error that will not pass."""
        code = error.code if isinstance(error, RemoteError) else ""
        if source != PARAMETER_SERVER:
            # After NotHere the source is alive and waits for the chunk itself, so it is kept for a while.
            if code != NotHere.code or self._now() - self._last_progress >= IDLE_SHARE * self._weights.deadline_s:
                self._leave(source, str(error))
            return
        if code == VersionGone.code:
            raise VersionGone(self._version, f"{source} does not hold it") from error
        if isinstance(error, RemoteError) and is_refusal(error):
            raise error
        # Logged at the first failure only, until a chunk arrives.
        if not self._last_failure:
            self._log.warning("chunks do not arrive", version=self._version, error=str(error))
        self._last_failure = str(error)
        await asyncio.sleep(pause(AWAY_S, 0, self._draws.random()))

    def _leave(self, source: str, problem: str) -> None:
        """Switch to the next source, if ``source`` is the one in use and not the parameter server, which is the last.

        So late failures of sources that were left before change nothing.
        """
        if source == self.source != PARAMETER_SERVER:
            del self._sources[0]
            self._last_progress = self._now()
            self._log.warning("relay is left", version=self._version, relay=source, next=self.source, error=problem)

    def _seal(self, index: int) -> None:
        """Seal and verify a bucket that has all its chunks; runs on a thread. Raises WeightsCorrupt."""
        segment, bucket = self._filling.pop(index), self._buckets[index]
        self._sealed[index] = seal_verified(segment, bucket, version=self._version, index=index)


def _write(segment: Segment, request: FetchChunk, chunk: Chunk) -> None:
    """Verify a chunk and write it into its bucket's memory. Raises ProtocolError for a corrupt chunk."""
    data = chunk.data.reshape(-1).view(np.uint8).data
    if data.nbytes != request.size:
        raise ProtocolError(f"{data.nbytes} bytes instead of {request.size}")
    checksum = xxhash.xxh3_64_intdigest(data)
    if checksum != chunk.checksum:
        raise ProtocolError(f"its checksum is {checksum:#018x} instead of {chunk.checksum:#018x}")
    segment.write(request.offset, data)


@dataclass(slots=True)
class _Held:
    """A version that the relay holds, whole or in part."""

    turn: int
    """Place of this fetch in the chain: above all fetches before it (parameter_server/conductor.py).

    A replica requests chunks only from fetches of lower turns, so two replicas never wait for each other. A request
    must name the turn: once the replica has begun another fetch, requests for this one are refused."""
    descriptors: dict[int, int] = field(default_factory=dict)
    """Descriptors of the buckets' memory."""
    checksums: dict[FetchChunk, int] = field(default_factory=dict)
    """Checksums of the chunks that have arrived."""
    whole: bool = False


class Relay:
    """Serves the chunks of fetched versions to other replicas; see the module's docstring. Used from the event loop."""

    def __init__(self) -> None:
        self._versions: dict[int, _Held] = {}
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="relay")
        """The thread that closes descriptors: that may free the memory, which takes long."""
        self._changed = ParkingLot()
        """Requests for chunks that have not arrived; woken when a chunk arrives and when a version is dropped."""

    def begin(self, version: int, turn: int) -> None:
        """Begin to hold a version whose fetch starts now.

        Drops what it has of this version from an earlier fetch, and every version that is not whole.
        """
        for other in [other for other, held in self._versions.items() if other == version or not held.whole]:
            self._drop(other)
        self._versions[version] = _Held(turn)

    def arrived(self, chunk: FetchChunk, descriptor: int, checksum: int) -> None:
        """Note a verified chunk, in its bucket's memory at ``descriptor``. Raises OSError if descriptors run out."""
        held = self._versions[chunk.version]
        if chunk.bucket not in held.descriptors:
            held.descriptors[chunk.bucket] = os.dup(descriptor)
        held.checksums[chunk] = checksum
        self._changed.wake()

    def whole(self, fetched: HeldVersion) -> list[str]:
        """Note that a version is whole, and drop older ones. Returns paths by which processes of this host open it."""
        held = self._versions[fetched.version]
        held.whole = True
        self.drop_below(fetched.version)
        return [path_of(held.descriptors[index]) for index in range(len(fetched.manifest.buckets))]

    def give_up(self, version: int) -> None:
        """Drop a version unless it is whole, because its fetch has ended."""
        if version in self._versions and not self._versions[version].whole:
            self._drop(version)

    def drop_below(self, version: int) -> None:
        """Drop older versions."""
        for other in [other for other in self._versions if other < version]:
            self._drop(other)

    async def chunk(self, request: FetchChunk, park_s: float) -> Chunk:
        """Return the requested bytes; waits up to ``park_s`` (s) until they have arrived.

        Raises VersionGone for a version that is not held by the requested turn, and InvalidRequest for bytes that are
        not a chunk here. Raises NotHere, which is retryable, for a chunk that has not arrived in time.
        """
        # ``arrived`` notes chunks with turn 0, because it gets requests before a turn is set.
        key = msgspec.structs.replace(request, turn=0)

        def find_chunk() -> tuple[int, int] | None:
            held = self._versions.get(request.version)
            if held is None or held.turn != request.turn:
                raise VersionGone(request.version)
            if key in held.checksums:
                return held.descriptors[key.bucket], held.checksums[key]
            if held.whole:
                raise InvalidRequest(f"{request} is not a chunk here")
            return None

        location = await self._changed.until(find_chunk, park_s)
        if location is None:
            where = f"bucket {request.bucket} at {request.offset}"
            raise NotHere(f"the chunk of version {request.version}, {where}, has not arrived within {park_s:.1f} s")
        descriptor, checksum = location
        # A copy of the descriptor, because the version may be dropped while the thread reads.
        data = await _in_thread(_read, os.dup(descriptor), request)
        return Chunk(data=np.frombuffer(data, np.uint8), checksum=checksum)

    def close(self) -> None:
        """Drop everything."""
        for version in list(self._versions):
            self._drop(version)
        self._closing.shutdown()

    def _drop(self, version: int) -> None:
        """Forget a version and close its descriptors, on the thread; requests for its chunks then fail."""
        self._closing.submit(close_all, list(self._versions.pop(version).descriptors.values()))
        self._changed.wake()


def _read(descriptor: int, chunk: FetchChunk) -> bytes:
    """Read a chunk, and close the descriptor: if it is the last one, the memory is freed here, on the thread."""
    try:
        data = os.pread(descriptor, chunk.size, chunk.offset)
    finally:
        os.close(descriptor)
    assert len(data) == chunk.size, "a chunk lies within its bucket"
    return data

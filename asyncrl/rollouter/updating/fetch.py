"""Fetches a version into sealed, verified memory of this host, while the engine generates.

Under ``shm`` the segments of another process of this host are opened and verified. Under ``stream`` segments of this
process are filled chunk by chunk: the chunks come from the replicas that the offer names, nearest first, and at last
from the parameter server. This host's own relay passes them on as they arrive.

A source other than the parameter server is left for good, for the next one, when a call to it fails, when it sends
other bytes than it says, and when it is alive but has had nothing new for IDLE_SHARE of ``weights.deadline_s``.

Invariants: a chunk's checksum is verified before it is written, a bucket's before it counts; at most
``weights.chunks_in_flight`` chunks are requested at once; a source that dies, or a parameter server that restarts with
the same version, costs only the chunks in flight; nothing stays open after a fetch that fails or is cancelled. Reading
and checksums run in threads.

Fails with VersionGone when the version is no longer held, WeightsCorrupt when its bytes are not those that were
published, DeadlineExceeded when no chunk arrives for ``weights.deadline_s`` or the fetch takes
``weights.stage_deadline_s``, and RemoteError.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import (
    DeadlineExceeded,
    NotHere,
    PeerRestarted,
    ProtocolError,
    RemoteError,
    VersionGone,
    WeightsCorrupt,
)
from asyncrl.messages import Request
from asyncrl.messages.weights import Bucket, Chunk, FetchChunk, Offer, Source
from asyncrl.observe.logging import get_logger
from asyncrl.rollouter.updating.relay import Relay
from asyncrl.rpc.calls.retry import is_refusal, pause
from asyncrl.weights.held_version import HeldVersion, layout_of
from asyncrl.weights.segments import Segment, open_segment, seal_verified, verify_segment

T = TypeVar("T")
Call = Callable[[str, Request, float | None], Awaitable[Any]]
"""A call: the actor, the request, and the timeout in seconds if it is not the usual one."""

PARAMETER_SERVER = "parameter_server/0"
CORRUPT_ATTEMPTS = 3
"""Times in a row that a chunk may arrive corrupt."""
AGAIN_S = 0.2
"""Longest first pause before a chunk whose call failed is requested again."""
SILENT_SHARE = 1 / 8
"""Share of weights.deadline_s: a source that is silent for so long is dead. A live one answers before half of it."""
IDLE_SHARE = 1 / 2
"""Share of weights.deadline_s: a source with nothing new for so long is left. Hosts nearer to the parameter server must
notice a dead source first, or all later hosts leave at once."""


async def fetch(
    offer: Offer, *, call: Call, weights: WeightsConfig, who: str = "rollouter", relay: Relay | None = None
) -> HeldVersion:
    """Fetch the version of an offer by shm or stream. ``who`` fetches, for logs and errors; ``relay`` gets each
    chunk."""
    assert offer.manifest is not None, "a broadcast is not fetched"
    layout_of(offer.manifest)
    fetching: _Shared | _Stream
    if offer.transport == "shm":
        fetching = _Shared(offer, weights, who)
    else:
        fetching = _Stream(offer, weights, who, call=call, relay=relay)
    try:
        async with asyncio.timeout(weights.stage_deadline_s) as limit:
            await fetching.run()
    except BaseException as error:
        await fetching.in_thread(fetching.close)
        if isinstance(error, TimeoutError) and limit.expired():
            what = (
                f"all of version {offer.version} by {offer.transport} (weights.stage_deadline_s; {fetching.progress})"
            )
            raise DeadlineExceeded(who, fetching.source, what, weights.stage_deadline_s) from error
        raise
    return HeldVersion(offer.manifest, [fetching.found[index] for index in range(len(offer.manifest.buckets))])


class _Fetching:
    """The descriptors found so far, and the threads that find them."""

    def __init__(self, offer: Offer, weights: WeightsConfig, who: str) -> None:
        assert offer.manifest is not None
        self.version, self.buckets = offer.version, offer.manifest.buckets
        self.found: dict[int, int] = {}
        """Descriptors by bucket: sealed and verified."""
        self._bytes = 0
        """Bytes that have arrived."""
        self._weights, self._who = weights, who
        self._cancelled = False

    @property
    def source(self) -> str:
        """Name of the actor that is asked."""
        return PARAMETER_SERVER

    @property
    def progress(self) -> str:
        """Progress in words, for errors."""
        total = sum(bucket.size for bucket in self.buckets)
        return f"{self._bytes} of {total} bytes are here"

    def close(self) -> None:
        """Close everything; a GiB takes about 0.1 s."""
        while self.found:
            os.close(self.found.popitem()[1])

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` as asyncio.to_thread does; a cancellation waits for the thread: its objects are closed next."""
        running = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._cancelled = True
            while not running.done():
                try:
                    await asyncio.wait({running})
                except asyncio.CancelledError:
                    continue
            # Retrieved, or asyncio would log it as an error that was never retrieved.
            running.exception()
            raise


class _Shared(_Fetching):
    """Opens the memory of a process on this host."""

    async def run(self) -> None:
        await self.in_thread(self._read)

    def _read(self) -> None:
        for index, bucket in enumerate(self.buckets):
            self._read_bucket(index, bucket)
            if self._cancelled:
                return

    def _read_bucket(self, index: int, bucket: Bucket) -> None:
        try:
            self.found[index] = open_segment(bucket, version=self.version, index=index)
        except WeightsCorrupt as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESRCH, errno.ENXIO):
                # The holder has died, or has closed it and may use the number for another file.
                raise VersionGone(self.version, str(error)) from error
            raise
        for _ in verify_segment(self.found[index], bucket, version=self.version, index=index):
            if self._cancelled:
                return
        self._bytes += bucket.size


class _Stream(_Fetching):
    """Fetches chunks over the wire."""

    def __init__(self, offer: Offer, weights: WeightsConfig, who: str, *, call: Call, relay: Relay | None) -> None:
        super().__init__(offer, weights, who)
        self._call, self._relay, self._log = call, relay, get_logger(who)
        self._sources = [*offer.sources, Source(PARAMETER_SERVER, 0)]
        """The source that is asked now, and the next ones."""
        self._since = self._now()
        """Time when a chunk last arrived, or the source changed."""
        self._chunks: deque[FetchChunk] = deque()
        """Chunks still to be requested."""
        self._missing: dict[int, int] = {}
        """Bytes of each bucket that have not arrived."""
        self._filling: dict[int, Segment] = {}
        self._limit: asyncio.Timeout
        self._last_failure = ""
        self._failures = 0
        """Failures of the parameter server since a chunk last arrived."""
        self._draws = random.Random(f"{who} {self.version}")

    @property
    def source(self) -> str:
        return self._sources[0].name

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        for index, bucket in enumerate(self.buckets):
            self._missing[index] = bucket.size
            for offset in range(0, bucket.size, self._weights.chunk_bytes):
                size = min(self._weights.chunk_bytes, bucket.size - offset)
                self._chunks.append(FetchChunk(version=self.version, bucket=index, offset=offset, size=size))
        deadline_s = self._weights.deadline_s
        try:
            async with asyncio.timeout(deadline_s) as self._limit, asyncio.TaskGroup() as tasks:
                for _ in range(min(self._weights.chunks_in_flight, len(self._chunks))):
                    tasks.create_task(self._work())
        except BaseExceptionGroup as group:
            # Callers distinguish errors by class, and the first one has ended the others.
            raise group.exceptions[0] from None
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            what = f"chunks of version {self.version} ({self.progress})"
            raise DeadlineExceeded(self._who, self.source, what, deadline_s, self._last_failure) from error
        finally:
            # By now no task and no thread writes any more.
            if self._filling:
                await self.in_thread(self._discard)

    def _discard(self) -> None:
        while self._filling:
            self._filling.popitem()[1].discard()

    async def _work(self) -> None:
        """Request chunks until none is left, as one of several tasks."""
        while self._chunks:
            request = self._chunks.popleft()
            corrupt = 0
            while problem := await self._fetch(request):
                corrupt += problem != LOST
                if corrupt >= CORRUPT_ATTEMPTS:
                    raise WeightsCorrupt(
                        f"its chunk at {request.offset} arrived corrupt {corrupt} times in a row: {problem}",
                        version=self.version,
                        bucket=request.bucket,
                    )

    async def _fetch(self, request: FetchChunk) -> str:
        """Fetch, verify and write a chunk. Returns "", LOST when the call failed, or the problem of a corrupt chunk."""
        (source, turn), index = msgspec.structs.astuple(self._sources[0]), request.bucket
        try:
            # A chunk may take as long as the fetch may be without one: another call would queue it again.
            timeout_s = self._weights.deadline_s * (1 if source == PARAMETER_SERVER else SILENT_SHARE)
            chunk: Chunk = await self._call(source, msgspec.structs.replace(request, turn=turn), timeout_s)
        except ProtocolError as error:
            return self._corrupt(request, source, str(error))
        except (DeadlineExceeded, PeerRestarted, RemoteError) as error:
            await self._failed(source, error)
            return LOST
        if index not in self._filling:
            self._filling[index] = Segment("asyncrl-weights", self.buckets[index].size)
        if problem := await self.in_thread(_write, self._filling[index], request, chunk):
            return self._corrupt(request, source, problem)
        self._bytes += request.size
        self._missing[index] -= request.size
        if self._relay is not None:
            self._relay.arrived(request, self._filling[index].fd, chunk.checksum)
        if not self._missing[index]:
            await self.in_thread(self._seal, index)
        self._last_failure, self._failures, self._since = "", 0, self._now()
        # A timeout that has expired cannot be rescheduled.
        if not self._limit.expired():
            self._limit.reschedule(self._since + self._weights.deadline_s)
        return ""

    def _corrupt(self, request: FetchChunk, source: str, problem: str) -> str:
        self._leave(source, problem)
        self._log.warning(
            "chunk is corrupt; it is fetched again",
            version=self.version,
            bucket=request.bucket,
            offset=request.offset,
            error=problem,
        )
        return problem

    async def _failed(self, source: str, error: DeadlineExceeded | PeerRestarted | RemoteError) -> None:
        """Handle a failed call: leave the source, pause before the next call, or raise an error that will not pass."""
        code = error.code if isinstance(error, RemoteError) else ""
        if source != PARAMETER_SERVER:
            # A source that is alive waits for the chunk itself.
            if code != NotHere.code or self._now() - self._since >= IDLE_SHARE * self._weights.deadline_s:
                self._leave(source, str(error))
            return
        if code == VersionGone.code:
            raise VersionGone(self.version, f"{source} does not hold it") from error
        if isinstance(error, RemoteError) and is_refusal(error):
            raise error
        if not self._last_failure:
            self._log.warning("chunks do not arrive", version=self.version, error=str(error))
        self._last_failure = str(error)
        again_s = pause(AGAIN_S, self._failures, self._draws.random())
        self._failures += 1
        await asyncio.sleep(again_s)

    def _leave(self, source: str, problem: str) -> None:
        """Ask the next source from here on. Late failures of earlier sources change nothing."""
        if source == self.source != PARAMETER_SERVER:
            del self._sources[0]
            self._since = self._now()
            self._log.warning("relay is left", version=self.version, relay=source, next=self.source, error=problem)

    def _seal(self, index: int) -> None:
        segment, bucket = self._filling.pop(index), self.buckets[index]
        self.found[index] = seal_verified(segment, bucket, version=self.version, index=index)


LOST = "lost"


def _write(segment: Segment, request: FetchChunk, chunk: Chunk) -> str:
    """Verify and write; returns the problem of the chunk, or an empty text."""
    data = chunk.data.reshape(-1).view(np.uint8).data
    if data.nbytes != request.size:
        return f"{data.nbytes} bytes instead of {request.size}"
    found = xxhash.xxh3_64_intdigest(data)
    if found != chunk.checksum:
        return f"its checksum is {found:#018x} instead of {chunk.checksum:#018x}"
    segment.write(request.offset, data)
    return ""

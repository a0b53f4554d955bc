"""Brings the bytes of a version into sealed, verified memory of this host, while the engine generates.

Under ``shm`` the segments of another process of this host are opened and verified; under ``stream`` segments of this
process are filled chunk by chunk: for each stripe of the chunks relays on other hosts are asked, and at last the
parameter server (sources.py), and this host's own relay hands them on as they come. With a delta and its base at hand,
that is read instead of the bucket and decoded; where it leads to other bytes than were published, the bucket itself is
read.

Invariants: a chunk's checksum is verified before it is written, a bucket's before it counts; never more than
``weights.chunks_in_flight`` chunks are asked for at once; a connection that breaks, a relay that dies, or a parameter
server that is restarted with the same version, costs no more than the chunks in flight; nothing of a fetch that fails
or is cancelled stays open. Reading, checksums and decoding run in threads.

Fails with VersionGone when the version is no longer held, WeightsCorrupt when its bytes are not what was published,
DeadlineExceeded when nothing has come for ``weights.deadline_s`` or all has not come in ``weights.stage_deadline_s``,
RemoteError and Refused as they come.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash

from asyncrl.config.rollout import WeightsConfig
from asyncrl.errors import (
    DeadlineExceeded,
    NotHere,
    PeerRestarted,
    ProtocolError,
    RemoteError,
    VersionGone,
    WeightsCorrupt,
    WireError,
)
from asyncrl.messages import Request
from asyncrl.messages.weights import Bucket, Chunk, Delta, FetchChunk, Manifest, Offer
from asyncrl.rollouter.updating.relay import Relay
from asyncrl.rollouter.updating.sources import PARAMETER_SERVER, Sources
from asyncrl.runtime.calls.retry import is_refusal, pause
from asyncrl.telemetry.logging import Logger, get_logger
from asyncrl.weights.chunks import ChunkPlan, Piece
from asyncrl.weights.segments import Segment, map_segment, open_segment, verify_segment
from asyncrl.weights.staging import StagedVersion, apply_delta, delta_against, layout_of, seal_verified

T = TypeVar("T")
Call = Callable[[str, Request, float | None], Awaitable[Any]]
"""A call: the actor to ask, the request, and the seconds if not as many as for any call."""

AGAIN_S = 0.2
"""Longest first pause before a chunk whose call failed is asked for again."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is here. ``encoded_bytes`` were read or received for it."""

    staged: StagedVersion
    encoded_bytes: int


async def fetch(
    offer: Offer,
    base: StagedVersion | None,
    *,
    call: Call,
    weights: WeightsConfig,
    who: str = "rollouter",
    relay: Relay | None = None,
) -> Fetched:
    """Take up an offer by shm or stream. ``base`` is a version to apply deltas to; it stays open meanwhile.

    ``call`` asks others; ``who`` asks, for logs and errors; ``relay`` is told of each chunk. The module tells what is
    raised.
    """
    assert offer.manifest is not None, "a broadcast is not fetched"
    layout = layout_of(offer.manifest)
    fetching: _Fetching
    if offer.transport == "shm":
        fetching = _Shared(offer.manifest, base, weights, who)
    else:
        ways = [offer.sources, *offer.more_sources]
        fetching = _Stream(offer.manifest, base, weights, who, ways=ways, call=call, relay=relay)
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
    found = [fetching.found[index] for index in range(len(offer.manifest.buckets))]
    return Fetched(StagedVersion(offer.manifest, layout, found), fetching.encoded_bytes)


class _Fetching:
    """The common part of both ways: the descriptors found so far, and the threads that find them."""

    source = PARAMETER_SERVER
    """Name of the actor that is asked."""

    def __init__(self, manifest: Manifest, base: StagedVersion | None, weights: WeightsConfig, who: str) -> None:
        self.version, self.buckets = manifest.version, manifest.buckets
        self.found: dict[int, int] = {}
        """Descriptors by bucket: sealed and verified."""
        self.encoded_bytes = 0
        self._base, self._weights, self._who = base, weights, who
        self._log: Logger = get_logger(who)
        usable = ((index, delta_against(base, bucket, index)) for index, bucket in enumerate(self.buckets))
        self._deltas = {index: delta for index, delta in usable if delta is not None}
        self._cancelled = False

    async def run(self) -> None:
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """Progress in words, for errors."""
        total = sum(bucket.size for bucket in self.buckets)
        return f"{self.encoded_bytes} of {total} bytes are here"

    def close(self) -> None:
        """Let go of everything; a GiB takes some 0.1 s."""
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
            # Looked at, or asyncio would tell of an error that nobody has retrieved.
            running.exception()
            raise

    def _decode(self, index: int, encoded: Any) -> None:
        """Decode a delta, in a thread. Raises WeightsCorrupt."""
        assert self._base is not None
        bucket = self.buckets[index]
        self.found[index] = apply_delta(encoded, self._base, bucket, version=self.version, index=index)

    def _reject_delta(self, index: int, error: Exception) -> None:
        delta = self._deltas.pop(index, None)
        if delta is not None:
            what = "delta failed; the whole bucket is taken"
            self._log.warning(what, version=self.version, bucket=index, base=delta.base, error=str(error))


class _Shared(_Fetching):
    """Fetches out of the memory of a process on this host."""

    async def run(self) -> None:
        await self.in_thread(self._read)

    def _read(self) -> None:
        for index, bucket in enumerate(self.buckets):
            if index in self._deltas:
                try:
                    self._read_delta(index, self._deltas[index])
                except WeightsCorrupt as error:
                    self._reject_delta(index, error)
            if index not in self.found:
                self._read_bucket(index, bucket)
            if self._cancelled:
                return

    def _read_delta(self, index: int, delta: Delta) -> None:
        self.encoded_bytes += delta.size
        encoded = Bucket(path=delta.path, size=delta.size, checksum=0, tensors=[])
        descriptor = open_segment(encoded, version=self.version, index=index)
        try:
            mapping = map_segment(descriptor, delta.size)
        finally:
            os.close(descriptor)
        self._decode(index, mapping)

    def _read_bucket(self, index: int, bucket: Bucket) -> None:
        try:
            self.found[index] = open_segment(bucket, version=self.version, index=index)
        except WeightsCorrupt as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESRCH, errno.ENXIO):
                # The holder has died, or let it go and may use the number for something else.
                raise VersionGone(self.version, str(error)) from error
            raise
        for _ in verify_segment(self.found[index], bucket, version=self.version, index=index):
            if self._cancelled:
                return
        self.encoded_bytes += bucket.size


class _Stream(_Fetching):
    """Fetches in chunks over the wire."""

    def __init__(self, *arguments: Any, ways: Sequence[Sequence[str]], call: Call, relay: Relay | None) -> None:
        super().__init__(*arguments)
        self._call, self._relay = call, relay
        now = asyncio.get_running_loop().time()
        self._sources = [Sources(way, deadline_s=self._weights.deadline_s, now=now) for way in ways]
        """Sources, for each stripe."""
        self._filling: dict[int, Segment] = {}
        self._limit: asyncio.Timeout
        self._last_failure = ""
        self._failures = 0
        """Failures since a chunk came last."""
        self._draws = random.Random(f"{self._who} {self.version}")

    @property
    def source(self) -> str:  # type: ignore[override]
        return ", ".join(dict.fromkeys(sources.present for sources in self._sources))

    async def run(self) -> None:
        deadline_s = self._weights.deadline_s
        try:
            async with asyncio.timeout(deadline_s) as self._limit:
                while missing := [index for index in range(len(self.buckets)) if index not in self.found]:
                    # A second time only for the buckets whose deltas failed.
                    await self._fetch(missing)
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            what = f"chunks of version {self.version} ({self.progress})"
            raise DeadlineExceeded(self._who, self.source, what, deadline_s, self._last_failure) from error

    async def _fetch(self, indices: list[int]) -> None:
        sizes = {i: self._deltas[i].size if i in self._deltas else self.buckets[i].size for i in indices}
        credit = self._weights.chunks_in_flight
        stripes = len(self._sources)
        plan = ChunkPlan(self.version, sizes, chunk_bytes=self._weights.chunk_bytes, credit=credit, stripes=stripes)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(min(credit, plan.chunks)):
                    tasks.create_task(self._work(plan, sizes, number % stripes))
            assert plan.done
        except BaseExceptionGroup as group:
            # Callers tell errors apart by their class, and the first one has ended the others.
            raise group.exceptions[0] from None
        finally:
            # By now no task and no thread writes any more.
            if self._filling:
                await self.in_thread(self._discard)

    def _discard(self) -> None:
        while self._filling:
            self._filling.popitem()[1].discard()

    async def _work(self, plan: ChunkPlan, sizes: dict[int, int], stripe: int) -> None:
        """Ask for chunks, as one of several tasks. A failed chunk is asked for again here: nobody waits for another.

        Each stripe has some tasks, so that one whose source is slow holds up no other, nor the hosts below in that.
        """
        while (piece := plan.take(stripe)) is not None:
            index, delta = piece.bucket, self._deltas.get(piece.bucket)
            sources = self._sources[plan.stripe_of(piece)]
            source = sources.present
            chunk = await self._ask(sources, plan, piece, delta)
            if chunk is None:
                continue
            if index not in self._filling:
                self._filling[index] = Segment("asyncrl-weights", sizes[index])
            problem = await self.in_thread(_write, self._filling[index], piece, chunk)
            if problem:
                self._leave(sources, source, problem)
                self._corrupt(plan, piece, problem)
            elif plan.accept(piece):
                self.encoded_bytes += piece.size
                if self._relay is not None and delta is None:
                    self._relay.arrived(self.version, piece, self._filling[index].fd, chunk.checksum)
                if plan.whole(index):
                    await self._complete(index, delta)
                self._came_on(sources)

    async def _ask(self, sources: Sources, plan: ChunkPlan, piece: Piece, delta: Delta | None) -> Chunk | None:
        """The chunk, not yet verified; None if it is to be asked for again or no longer wanted."""
        source = sources.present
        base = -1 if delta is None else delta.base
        request = FetchChunk(version=self.version, bucket=piece.bucket, offset=piece.offset, size=piece.size, base=base)
        try:
            chunk: Chunk = await self._call(source, request, sources.timeout_s)
            return chunk
        except ProtocolError as error:
            self._leave(sources, source, str(error))
            self._corrupt(plan, piece, str(error))
            return None
        except (DeadlineExceeded, PeerRestarted) as error:
            lost: WireError = error
            self._leave(sources, source, str(error))
        except RemoteError as error:
            if error.code == NotHere.code:
                # The relay waits for it as well.
                if sources.has_nothing(source, self._now()):
                    self._tell_left(sources, source, str(error))
                plan.lost(piece)
                return None
            if source != PARAMETER_SERVER:
                self._leave(sources, source, str(error))
                plan.lost(piece)
                return None
            if error.code == VersionGone.code:
                raise VersionGone(self.version, f"{error.actor} has let it go") from error
            if is_refusal(error):
                if delta is None:
                    raise
                # A parameter server that was restarted need not have the same deltas.
                plan.drop(piece.bucket)
                self._reject_delta(piece.bucket, error)
                return None
            lost = error
        plan.lost(piece)
        if source != PARAMETER_SERVER:
            return None
        if not self._last_failure:
            self._log.warning("chunks do not come", version=self.version, error=str(lost))
        self._last_failure = str(lost)
        again_s = pause(AGAIN_S, self._failures, self._draws.random())
        self._failures += 1
        await asyncio.sleep(again_s)
        return None

    def _leave(self, sources: Sources, source: str, problem: str) -> None:
        """A relay that fails is asked no more for this stripe."""
        if sources.failed(source, self._now()):
            self._tell_left(sources, source, problem)

    def _tell_left(self, sources: Sources, source: str, problem: str) -> None:
        self._log.warning("relay is left", version=self.version, relay=source, next=sources.present, error=problem)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _corrupt(self, plan: ChunkPlan, piece: Piece, problem: str) -> None:
        """Note a corrupt chunk. Raises WeightsCorrupt when it has been so too often."""
        self._log.warning(
            "chunk is corrupt; it is fetched again",
            version=self.version,
            bucket=piece.bucket,
            offset=piece.offset,
            error=problem,
        )
        plan.corrupt(piece, problem)

    def _came_on(self, sources: Sources) -> None:
        self._last_failure, self._failures = "", 0
        sources.came(self._now())
        # A timeout that is over cannot be set anew.
        if not self._limit.expired():
            self._limit.reschedule(self._now() + self._weights.deadline_s)

    async def _complete(self, index: int, delta: Delta | None) -> None:
        """Verify a whole bucket. Raises WeightsCorrupt when it is not what was published."""
        if delta is None:
            await self.in_thread(self._seal, index)
            return
        try:
            await self.in_thread(self._decode_filled, index)
        except WeightsCorrupt as error:
            self._reject_delta(index, error)

    def _seal(self, index: int) -> None:
        segment, bucket = self._filling.pop(index), self.buckets[index]
        self.found[index] = seal_verified(segment, bucket, version=self.version, index=index)

    def _decode_filled(self, index: int) -> None:
        segment = self._filling.pop(index)
        try:
            self._decode(index, segment.memory)
        finally:
            segment.discard()


def _write(segment: Segment, piece: Piece, chunk: Chunk) -> str:
    """Verify and write; returns the problem of the chunk, if there is one."""
    data = chunk.data.reshape(-1).view(np.uint8).data
    if data.nbytes != piece.size:
        return f"{data.nbytes} bytes instead of {piece.size}"
    found = xxhash.xxh3_64_intdigest(data)
    if found != chunk.checksum:
        return f"its checksum is {found:#018x} instead of {chunk.checksum:#018x}"
    segment.write(piece.offset, data)
    return ""

"""The versions at hand: their snapshots, chunks of them, and their deltas, which are encoded beside the event loop.

Each snapshot in here is released exactly once: when it is no longer to be kept, or at the end, also one that a thread
was still encoding then.

Fails with VersionGone for a version that is not here.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from asyncrl.errors import InvalidRequest, VersionGone
from asyncrl.messages.weights import Bucket, Chunk, Delta, FetchChunk, Manifest
from asyncrl.parameter_server.snapshots import HeldSnapshot
from asyncrl.weights.delta import encode
from asyncrl.weights.segments import ITEM_BYTES, Segment, size_of

MAX_CHECKSUMS = 65536
"""Checksums that are remembered, the newest ones: a few MiB, for 256 GiB in chunks of 4 MiB."""
MAX_THREADS = 4
"""The other cores are the learner's and the engines'."""


class HeldVersions:
    """The held versions. Used from the event loop."""

    def __init__(self) -> None:
        self._snapshots: dict[int, HeldSnapshot] = {}
        self._chunks = ChunkServer()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="snapshots")
        self._encoding: tuple[int, Future[HeldSnapshot]] | None = None

    def add(self, snapshot: HeldSnapshot) -> None:
        """Take a snapshot over."""
        self._snapshots[snapshot.manifest.version] = snapshot

    @property
    def versions(self) -> Collection[int]:
        """Versions at hand."""
        return self._snapshots.keys()

    def manifest(self, version: int) -> Manifest:
        """Manifest of a version. Raises VersionGone."""
        return self._find(version).manifest

    def chunk(self, request: FetchChunk) -> Chunk:
        """Bytes of a version. Raises VersionGone, or InvalidRequest for bytes past the end."""
        return self._chunks.chunk(self._find(request.version), request)

    def keep(self, versions: Collection[int]) -> None:
        """Release all other versions, but for the one that is being encoded."""
        encoding = self._encoding[0] if self._encoding is not None else None
        for version in [v for v in self._snapshots if v not in versions and v != encoding]:
            self._chunks.forget(version)
            # The kernel takes a tenth of a second for each gigabyte that it gets back.
            self._workers.submit(self._snapshots.pop(version).release)

    async def verify(self, version: int) -> None:
        """Compare a version with its checksums. Raises WeightsCorrupt naming a bucket, and VersionGone."""
        await asyncio.wrap_future(self._workers.submit(self._find(version).verify))

    async def encode(self, version: int, base: int) -> None:
        """Give a version its deltas against another one. Raises OSError; the version is then as it was."""
        assert self._encoding is None, "one at a time"
        future = self._workers.submit(encode_deltas, self._find(base), self._find(version))
        self._encoding = version, future
        try:
            self._snapshots[version] = await asyncio.wrap_future(future)
        except Exception:
            self._encoding = None
            raise
        # Not when this is cancelled: the thread goes on, and ``close`` waits for its snapshot.
        self._encoding = None

    async def close(self) -> None:
        """Release everything."""
        encoding, self._encoding = self._encoding, None
        # The version that is being encoded goes, too: of its release and its encoding the later finds the other done.
        self.keep(())
        await asyncio.to_thread(self._workers.shutdown)
        if encoding is not None and not encoding[1].cancelled() and encoding[1].exception() is None:
            encoding[1].result().release()

    def _find(self, version: int) -> HeldSnapshot:
        if version not in self._snapshots:
            raise VersionGone(version)
        return self._snapshots[version]


class ChunkServer:
    """Server of chunks to replicas that fetch over the wire, of the snapshots that it is given. Used from one thread.

    A chunk is a view of the segment's own memory, which ZeroMQ sends without a copy. Its checksum is computed when it
    is first asked for and remembered: several replicas ask for the same chunks at about the same time.
    """

    def __init__(self) -> None:
        self._checksums: dict[tuple[int, int, int, int, int], int] = {}
        """(version, bucket, base, offset, size): xxh3_64."""

    def chunk(self, snapshot: HeldSnapshot, request: FetchChunk) -> Chunk:
        """Bytes of a chunk. Takes as long as a checksum of them (a millisecond for 8 MiB), once.

        Raises InvalidRequest for bytes past the end, and VersionGone for a version that was released.
        """
        assert snapshot.manifest.version == request.version, "the caller finds the snapshot"
        content = snapshot.bytes_of(request.bucket, request.base)
        end = request.offset + request.size
        if end > content.nbytes:
            raise InvalidRequest(
                f"bytes {request.offset} to {end} of bucket {request.bucket} of version {request.version}, "
                f"of which there are {content.nbytes}"
            )
        data = content[request.offset : end]
        key = (request.version, request.bucket, request.base, request.offset, request.size)
        checksum = self._checksums.get(key)
        if checksum is None:
            checksum = self._checksums[key] = xxhash.xxh3_64_intdigest(data)
            if len(self._checksums) > MAX_CHECKSUMS:
                del self._checksums[next(iter(self._checksums))]
        return Chunk(data=np.frombuffer(data, np.uint8), checksum=checksum)

    def forget(self, version: int) -> None:
        """Forget a version's checksums: it is asked for no more."""
        self._checksums = {key: checksum for key, checksum in self._checksums.items() if key[0] != version}


def encode_deltas(base: HeldSnapshot, snapshot: HeldSnapshot) -> HeldSnapshot:
    """``snapshot`` with deltas against ``base``: of each bucket whose layout is the base's and whose encoding pays.

    All of its descriptors go over to the result, which is to be released instead of it. ``base`` may be released
    meanwhile. Reads and writes the segments, the buckets in parallel; that blocks for a second per GiB and core. Raises
    VersionGone when either version has been released, and OSError when memory or descriptors run out; both snapshots
    are then as they were.
    """
    pairs = {
        index: (base.bytes_of(index), snapshot.bytes_of(index))
        # Another layout may have another number of buckets.
        for index, (old, new) in enumerate(zip(base.manifest.buckets, snapshot.manifest.buckets, strict=False))
        if old.size == new.size and old.tensors == new.tensors
    }
    version = base.manifest.version
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        encodings = {
            index: pool.submit(_encode, version, old, new, item_bytes(snapshot.manifest.buckets[index]))
            for index, (old, new) in pairs.items()
        }
    try:
        results = {index: encoding.result() for index, encoding in encodings.items()}
        return snapshot.with_deltas({index: result for index, result in results.items() if result is not None})
    except BaseException:
        for encoding in encodings.values():
            if encoding.exception() is None and (made := encoding.result()) is not None:
                os.close(made[1])
        raise


def _encode(base: int, old: memoryview, new: memoryview, item_bytes: int) -> tuple[Delta, int] | None:
    encoded = encode(old, new, item_bytes)
    if encoded is None:
        return None
    segment = Segment("asyncrl-delta", len(encoded))
    try:
        segment.write(0, encoded)
        sealed = segment.seal([])
    except BaseException:
        segment.discard()
        raise
    return Delta(base=base, path=sealed.path, size=sealed.size), segment.fd


def item_bytes(bucket: Bucket) -> int:
    """Bytes of each of the numbers that take up most of the bucket."""
    # A bucket without tensors counts as one of single bytes.
    sizes: Counter[int] = Counter({1: 0})
    for spec in bucket.tensors:
        sizes[ITEM_BYTES[spec.dtype]] += size_of(spec)
    return max(sizes, key=sizes.__getitem__)

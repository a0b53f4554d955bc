"""The versions at hand: their snapshots, chunks of them, and their deltas, which are encoded beside the event loop.

Each snapshot in here is released exactly once: when it is no longer to be kept, or at the end, also one that a thread
was still encoding then.

Fails with VersionGone for a version that is not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from asyncrl.errors import VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest
from asyncrl.parameter_server.chunk_server import ChunkServer
from asyncrl.parameter_server.deltas import encode_deltas
from asyncrl.parameter_server.snapshots import Snapshot


class HeldVersions:
    """The held versions. Used from the event loop."""

    def __init__(self) -> None:
        self._snapshots: dict[int, Snapshot] = {}
        self._chunks = ChunkServer()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="snapshots")
        self._encoding: tuple[int, Future[Snapshot]] | None = None

    def add(self, snapshot: Snapshot) -> None:
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
        self.keep(())
        await asyncio.to_thread(self._workers.shutdown)
        if encoding is not None and not encoding[1].cancelled() and encoding[1].exception() is None:
            encoding[1].result().release()

    def _find(self, version: int) -> Snapshot:
        if version not in self._snapshots:
            raise VersionGone(version)
        return self._snapshots[version]

"""The versions that the parameter server holds, and chunks of them for replicas that fetch over the wire.

A chunk is a view of the segment's own memory, which ZeroMQ sends without a copy. Its checksum is computed when it is
first asked for and remembered, because several replicas ask for the same chunks at about the same time.

Each version is closed exactly once: when it is no longer needed, or at the end. Fails with VersionGone for a version
that is not held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from asyncrl.core.errors import InvalidRequest, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest
from asyncrl.weights.held_version import HeldVersion

MAX_CHECKSUMS = 65536
"""Checksums that are remembered, the newest ones: a few MiB, for 256 GiB in chunks of 4 MiB."""


class HeldVersions:
    """The held versions. Used from the event loop."""

    def __init__(self) -> None:
        self._held: dict[int, HeldVersion] = {}
        self._checksums: dict[FetchChunk, int] = {}
        """xxh3_64 of the chunks that were served."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="versions")

    def add(self, version: HeldVersion) -> None:
        """Take a version over."""
        self._held[version.version] = version

    @property
    def versions(self) -> Collection[int]:
        """Versions held."""
        return self._held.keys()

    def manifest(self, version: int) -> Manifest:
        """Manifest of a version. Raises VersionGone."""
        return self._find(version).manifest

    def chunk(self, request: FetchChunk) -> Chunk:
        """Bytes of a version. Takes as long as a checksum of them (a millisecond for 8 MiB), once.

        Raises VersionGone, and InvalidRequest for bytes past the end.
        """
        content = self._find(request.version).bytes_of(request.bucket)
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
        """Close all other versions."""
        gone = [version for version in self._held if version not in versions]
        for version in gone:
            # The kernel takes a tenth of a second for each gigabyte that it gets back.
            self._threads.submit(self._held.pop(version).close)
        if gone:
            self._checksums = {key: checksum for key, checksum in self._checksums.items() if key.version in versions}

    async def verify(self, version: int) -> None:
        """Compare a version with its checksums. Raises WeightsCorrupt naming a bucket, and VersionGone."""
        await asyncio.wrap_future(self._threads.submit(self._find(version).verify))

    async def close(self) -> None:
        """Close everything."""
        self.keep(())
        await asyncio.to_thread(self._threads.shutdown)

    def _find(self, version: int) -> HeldVersion:
        if version not in self._held:
            raise VersionGone(version)
        return self._held[version]

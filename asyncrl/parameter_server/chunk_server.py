"""Chunks of held versions for replicas that fetch them over the wire.

A chunk is a view of the segment's own memory, which ZeroMQ sends without a copy. Its checksum is computed when it is
first asked for and remembered: several replicas ask for the same chunks at about the same time.

Fails with InvalidRequest for bytes past the end, and with VersionGone for a version that was released.
"""

from __future__ import annotations

import numpy as np
import xxhash

from asyncrl.errors import InvalidRequest
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.parameter_server.snapshots import Snapshot

MAX_CHECKSUMS = 65536
"""Checksums that are remembered, the newest ones: a few MiB, for 256 GiB in chunks of 4 MiB."""


class ChunkServer:
    """Server of chunks of the snapshots that it is given. Used from one thread."""

    def __init__(self) -> None:
        self._checksums: dict[tuple[int, int, int, int, int], int] = {}
        """(version, bucket, base, offset, size): xxh3_64."""

    def chunk(self, snapshot: Snapshot, request: FetchChunk) -> Chunk:
        """Bytes of a chunk. Takes as long as a checksum of them (a millisecond for 8 MiB), once."""
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

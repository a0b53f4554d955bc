"""Versions that this replica has brought to its host, for the other replicas there, and the hosts below it, by chunks.

A chunk is served once it has arrived and was verified, with the checksum that it came with, while the rest is still
under way. A version is held from its first chunk until a newer one is whole here, by descriptors of its own: however
the update ends, others may open it or ask for more of it. At most one whole version and one that is under way are
held.

Fails with VersionGone for a version that is not held, InvalidRequest for bytes that were never a chunk here, and
NotHere, which is retryable, for a chunk that has not come in time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from asyncrl.errors import InvalidRequest, NotHere, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.runtime.parking import ParkingLot
from asyncrl.weights.chunks import Piece
from asyncrl.weights.segments import path_of
from asyncrl.weights.staging import StagedVersion


@dataclass(slots=True)
class _HeldChunk:
    descriptors: dict[int, int] = field(default_factory=dict)
    """Descriptors of the buckets' memory."""
    checksums: dict[Piece, int] = field(default_factory=dict)
    """Checksums of the chunks that have arrived."""
    whole: bool = False


class Relay:
    """The relay of a replica. Used from the event loop."""

    def __init__(self) -> None:
        self._versions: dict[int, _HeldChunk] = {}
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="relay")
        self._changed = ParkingLot()

    def begin(self, version: int) -> None:
        """Begin a version that is fetched now. Any other that is under way was given up."""
        for other in [other for other, held in self._versions.items() if other == version or not held.whole]:
            self._drop(other)
        self._versions[version] = _HeldChunk()

    def arrived(self, version: int, piece: Piece, descriptor: int, checksum: int) -> None:
        """A verified chunk lies in the memory of its bucket. Raises OSError where descriptors run out."""
        held = self._versions[version]
        if piece.bucket not in held.descriptors:
            held.descriptors[piece.bucket] = os.dup(descriptor)
        held.checksums[piece] = checksum
        self._changed.wake()

    def whole(self, staged: StagedVersion) -> list[str]:
        """Take a version for whole, sealed and verified; returns paths where others of this host find its buckets."""
        held = self._versions[staged.version]
        for index, bucket in enumerate(staged.manifest.buckets):
            # It came by shm or as a delta, and so not by chunks.
            if index not in held.descriptors:
                held.descriptors[index] = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
        held.whole = True
        self.drop_below(staged.version)
        return [path_of(held.descriptors[index]) for index in range(len(staged.manifest.buckets))]

    def give_up(self, version: int) -> None:
        """Drop a version that does not become whole here."""
        if version in self._versions and not self._versions[version].whole:
            self._drop(version)

    def drop_below(self, version: int) -> None:
        """Drop older versions, which nobody asks for any more."""
        for other in [other for other in self._versions if other < version]:
            self._drop(other)

    async def chunk(self, request: FetchChunk, park_s: float) -> Chunk:
        """The bytes asked for, parked until they have arrived. The module tells what is raised."""
        piece = Piece(request.bucket, request.offset, request.size)

        def found() -> tuple[int, int] | None:
            held = self._versions.get(request.version)
            if held is None:
                raise VersionGone(request.version)
            if request.base < 0 and piece in held.checksums:
                return held.descriptors[piece.bucket], held.checksums[piece]
            if held.whole or request.base >= 0:
                raise InvalidRequest(f"{piece} of version {request.version} against {request.base} is no chunk here")
            return None

        there = await self._changed.until(found, park_s)
        if there is None:
            raise NotHere(f"{piece} of version {request.version} has not come within {park_s:.1f} s")
        # Its own, since the version may be dropped while a thread reads. The thread takes it when it begins; one that
        # nobody waits for any more may never do so.
        own = [os.dup(there[0])]
        try:
            data = await asyncio.to_thread(_read, own, piece)
        finally:
            with suppress(IndexError):
                os.close(own.pop())
        return Chunk(data=np.frombuffer(data, np.uint8), checksum=there[1])

    def close(self) -> None:
        """Hold nothing any more."""
        for version in list(self._versions):
            self._drop(version)
        self._closing.shutdown()

    def _drop(self, version: int) -> None:
        # The kernel takes a tenth of a second for each gigabyte that it gets back.
        self._closing.submit(_close, self._versions.pop(version).descriptors.values())
        self._changed.wake()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(own: list[int], piece: Piece) -> bytes:
    descriptor = own.pop()
    try:
        data = os.pread(descriptor, piece.size, piece.offset)
    finally:
        os.close(descriptor)
    assert len(data) == piece.size, "a chunk lies within its bucket"
    return data

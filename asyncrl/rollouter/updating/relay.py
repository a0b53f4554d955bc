"""The version that this replica fetches for its host: for the other replicas there, and by chunks for the next host.

A chunk is served once it has arrived and was verified, with the checksum that it came with, while the rest is still on
its way. A version is held from its first chunk until a newer one is whole here, by descriptors of its own: whatever
becomes of the update, others may open it or ask for more of it. At most one whole version and one that is on its way
are held.

Fails with VersionGone for a version that is not held by the requested turn, with InvalidRequest for bytes that are not
a chunk here, and with NotHere, which is retryable, for a chunk that has not arrived in time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from asyncrl.core.errors import InvalidRequest, NotHere, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.rpc.parking import ParkingLot
from asyncrl.weights.held_version import HeldVersion
from asyncrl.weights.segments import path_of


@dataclass(slots=True)
class _Arriving:
    turn: int
    descriptors: dict[int, int] = field(default_factory=dict)
    """Descriptors of the buckets' memory."""
    checksums: dict[FetchChunk, int] = field(default_factory=dict)
    """Checksums of the chunks that have arrived."""
    whole: bool = False


class Relay:
    """The relay of a replica. Used from the event loop."""

    def __init__(self) -> None:
        self._versions: dict[int, _Arriving] = {}
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="relay")
        self._changed = ParkingLot()

    def begin(self, version: int, turn: int) -> None:
        """Begin a version that is fetched now, by this turn. Any other that is not whole was given up."""
        for other in [other for other, held in self._versions.items() if other == version or not held.whole]:
            self._drop(other)
        self._versions[version] = _Arriving(turn)

    def arrived(self, chunk: FetchChunk, descriptor: int, checksum: int) -> None:
        """A verified chunk is in the memory of its bucket. Raises OSError where descriptors run out."""
        held = self._versions[chunk.version]
        if chunk.bucket not in held.descriptors:
            held.descriptors[chunk.bucket] = os.dup(descriptor)
        held.checksums[chunk] = checksum
        self._changed.wake()

    def whole(self, fetched: HeldVersion) -> list[str]:
        """Note that a version is whole, sealed and verified; returns paths at which others of this host open it."""
        held = self._versions[fetched.version]
        held.whole = True
        self.drop_below(fetched.version)
        return [path_of(held.descriptors[index]) for index in range(len(fetched.manifest.buckets))]

    def give_up(self, version: int) -> None:
        """Drop a version that does not become whole here."""
        if version in self._versions and not self._versions[version].whole:
            self._drop(version)

    def drop_below(self, version: int) -> None:
        """Drop older versions."""
        for other in [other for other in self._versions if other < version]:
            self._drop(other)

    async def chunk(self, request: FetchChunk, park_s: float) -> Chunk:
        """The requested bytes, parked until they have arrived. Raises as the module says."""

        chunk = replace(request, turn=0)

        def found() -> tuple[int, int] | None:
            held = self._versions.get(request.version)
            if held is None or held.turn != request.turn:
                raise VersionGone(request.version)
            if chunk in held.checksums:
                return held.descriptors[chunk.bucket], held.checksums[chunk]
            if held.whole:
                raise InvalidRequest(f"{request} is not a chunk here")
            return None

        there = await self._changed.until(found, park_s)
        if there is None:
            where = f"bucket {request.bucket} at {request.offset}"
            raise NotHere(f"the chunk of version {request.version}, {where}, has not arrived within {park_s:.1f} s")
        # A copy, because the version may be dropped while a thread reads. The thread takes it when it begins; if the
        # caller has gone by then, that may never happen.
        own = [os.dup(there[0])]
        try:
            data = await asyncio.to_thread(_read, own, request)
        finally:
            with suppress(IndexError):
                os.close(own.pop())
        return Chunk(data=np.frombuffer(data, np.uint8), checksum=there[1])

    def close(self) -> None:
        """Drop everything."""
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


def _read(own: list[int], chunk: FetchChunk) -> bytes:
    descriptor = own.pop()
    try:
        data = os.pread(descriptor, chunk.size, chunk.offset)
    finally:
        os.close(descriptor)
    assert len(data) == chunk.size, "a chunk lies within its bucket"
    return data

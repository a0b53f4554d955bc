"""Chunks of held versions: served without a copy, with a checksum that is computed once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from published_weights import (
    held,
    open_memory,
    random_bytes,
)

from asyncrl.core.errors import InvalidRequest, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.parameter_server import actor
from asyncrl.parameter_server.actor import HeldVersions

pytestmark = pytest.mark.usefixtures("no_memory_left")


def request(bucket: int = 0, offset: int = 0, size: int = 1) -> FetchChunk:
    return FetchChunk(version=3, bucket=bucket, offset=offset, size=size)


def serving(*contents: bytes) -> HeldVersions:
    """Version 3."""
    made = HeldVersions()
    made.by_number[3] = held(3, contents)
    return made


def test_a_chunk_is_a_view_of_the_segment() -> None:
    content = random_bytes(10_000)
    versions = serving(b"x", content)
    chunk = versions.chunk(request(1, 4096, 5000))
    assert chunk.data.tobytes() == content[4096:9096]
    assert chunk.checksum == xxhash.xxh3_64_intdigest(content[4096:9096])
    assert np.shares_memory(chunk.data, np.frombuffer(versions.find(3).bytes_of(1), np.uint8))
    assert not chunk.data.flags.writeable
    asyncio.run(versions.close())


def test_a_checksum_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(data: memoryview) -> int:
        computed.append(data.nbytes)
        return xxhash.xxh3_64_intdigest(data)

    monkeypatch.setattr(actor, "xxhash", SimpleNamespace(xxh3_64_intdigest=counted))
    monkeypatch.setattr(actor, "MAX_CHECKSUMS", 4)
    before = open_memory()
    server = serving(random_bytes(100))
    # Four are kept; the oldest is dropped.
    for offset, count in ((0, 1), (10, 2), (20, 3), (30, 4), (0, 4), (30, 4), (40, 5), (10, 5), (0, 6)):
        server.chunk(request(offset=offset, size=10))
        assert len(computed) == count
    asyncio.run(server.close())
    assert len(server._checksums) == 4
    assert open_memory() == before, "close waits until the memory is free"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(2), "version 3 has no bucket 2"),
        (request(0, 0, 101), "bytes 0 to 101 of bucket 0 of version 3, which has 100"),
        (request(0, 1 << 60, 1 << 60), "which has 100"),
    ],
)
def test_unknown_bytes_are_an_error(asked: FetchChunk, words: str) -> None:
    versions = serving(random_bytes(100), b"yz")
    with pytest.raises(InvalidRequest, match=words):
        versions.chunk(asked)
    asyncio.run(versions.close())
    with pytest.raises(VersionGone, match="version 3"):
        versions.chunk(request(0))


def test_a_chunk_outlives_its_version() -> None:
    before = open_memory()
    content = random_bytes(100_000)
    versions = serving(content)
    chunk: Chunk | None = versions.chunk(request(size=100_000))
    asyncio.run(versions.close())
    assert chunk is not None
    assert chunk.data.tobytes() == content
    assert open_memory() > before
    chunk = None
    assert open_memory() == before

"""Chunks and deltas of held versions: served without a copy, checksummed once, gone when nobody needs them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from harness import replace
from published_weights import (
    as_streamed,
    contents_of,
    held,
    only_new_objects_collected,
    open_memory,
    random_bytes,
    seal,
    stepped,
)

from asyncrl.errors import InvalidRequest, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest
from asyncrl.parameter_server import held as held_versions
from asyncrl.parameter_server.held import ChunkServer, encode_deltas, item_bytes
from asyncrl.parameter_server.snapshots import hold
from asyncrl.weights import delta
from asyncrl.weights.segments import layout


@pytest.fixture(autouse=True, scope="module")
def _heap():
    with only_new_objects_collected():
        yield


@pytest.fixture(autouse=True)
def no_leak():
    before = open_memory()
    yield
    assert open_memory() == before


def request(bucket: int = 0, offset: int = 0, size: int = 1, base: int = -1, version: int = 3) -> FetchChunk:
    return FetchChunk(version=version, bucket=bucket, offset=offset, size=size, base=base)


def test_a_chunk_is_a_view_of_the_segment() -> None:
    content = random_bytes(10_000)
    snapshot = held(3, [b"x", content])
    chunk = ChunkServer().chunk(snapshot, request(1, 4096, 5000))
    assert chunk.data.tobytes() == content[4096:9096]
    assert chunk.checksum == xxhash.xxh3_64_intdigest(content[4096:9096])
    assert np.shares_memory(chunk.data, np.frombuffer(snapshot.bytes_of(1), np.uint8))
    assert not chunk.data.flags.writeable
    snapshot.release()


def test_a_checksum_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(data: memoryview) -> int:
        computed.append(data.nbytes)
        return xxhash.xxh3_64_intdigest(data)

    monkeypatch.setattr(held_versions, "xxhash", SimpleNamespace(xxh3_64_intdigest=counted))
    monkeypatch.setattr(held_versions, "MAX_CHECKSUMS", 4)
    snapshot, server = held(3, [random_bytes(100)]), ChunkServer()
    # Four are kept, of which the oldest has to go.
    for offset, count in ((0, 1), (10, 2), (20, 3), (30, 4), (0, 4), (30, 4), (40, 5), (10, 5), (0, 6)):
        server.chunk(snapshot, request(offset=offset, size=10))
        assert len(computed) == count
    for forgotten, count in ((2, 6), (3, 7)):
        server.forget(forgotten)
        server.chunk(snapshot, request(offset=0, size=10))
        assert len(computed) == count
    snapshot.release()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(2), "version 3 has no bucket 2"),
        (request(0, 0, 101), "bytes 0 to 101 of bucket 0 of version 3, of which there are 100"),
        (request(0, 1 << 60, 1 << 60), "of which there are 100"),
        (request(0, base=2), "no bucket 0 with a delta against version 2"),
    ],
)
def test_what_there_is_not_is_an_error(asked: FetchChunk, words: str) -> None:
    snapshot = held(3, [random_bytes(100), b"yz"])
    with pytest.raises(InvalidRequest, match=words):
        ChunkServer().chunk(snapshot, asked)
    snapshot.release()
    with pytest.raises(VersionGone, match="version 3"):
        ChunkServer().chunk(snapshot, request(0))


def test_a_chunk_outlives_the_release_of_its_version() -> None:
    before = open_memory()
    content = random_bytes(100_000)
    snapshot, server = held(3, [content]), ChunkServer()
    chunk: Chunk | None = server.chunk(snapshot, request(size=100_000))
    snapshot.release()
    snapshot.release()
    server.forget(3)
    assert chunk is not None
    assert chunk.data.tobytes() == content
    assert open_memory() > before
    chunk = None
    assert open_memory() == before


# --- deltas ---


def test_deltas_lead_from_one_version_to_the_next() -> None:
    old = [random_bytes(200_000, seed) for seed in range(3)] + [b"x"]
    new = [stepped(old[0]), random_bytes(200_000, 9), old[2], b"y"]
    base, plain = held(3, old), held(4, new)
    snapshot = encode_deltas(base, plain)
    plain.release()
    with pytest.raises(VersionGone):
        plain.bytes_of(0)
    assert contents_of(snapshot.manifest) == new
    found = [bucket.delta for bucket in snapshot.manifest.buckets]
    assert [each is not None for each in found] == [True, False, True, False]
    for index in (0, 2):
        made = found[index]
        assert made is not None
        assert made.base == 3
        assert made.size < 0.1 * len(new[index])
        out = bytearray(len(new[index]))
        delta.decode(snapshot.bytes_of(index, 3), base.bytes_of(index), out)
        assert out == new[index]
        chunk = ChunkServer().chunk(snapshot, request(index, 0, made.size, 3, version=4))
        assert chunk.data.tobytes() == snapshot.bytes_of(index, 3)
    with pytest.raises(InvalidRequest, match="delta against version 2"):
        snapshot.bytes_of(0, 2)
    assert as_streamed(snapshot.manifest).buckets[0].delta == replace(found[0], path="")
    base.release()
    snapshot.release()


def test_other_layouts_have_no_delta() -> None:
    base, plain = held(3, [bytes(1000), bytes(1000)]), held(4, [bytes(1002)])
    snapshot = encode_deltas(base, plain)
    assert [bucket.delta for bucket in snapshot.manifest.buckets] == [None]
    snapshot.release()
    # The same size under another name.
    bucket, descriptor = seal(bytes(1000), "other")
    renamed = hold(Manifest(version=5, buckets=[bucket]))
    os.close(descriptor)
    snapshot = encode_deltas(base, renamed)
    assert [bucket.delta for bucket in snapshot.manifest.buckets] == [None]
    snapshot.release()
    base.release()


def test_a_version_released_while_it_is_encoded_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, plain = held(3, [bytes(1000)]), held(4, [bytes(1000)])

    def encode(old: memoryview, new: memoryview, item: int) -> bytes | None:
        base.release()
        plain.release()
        return delta.encode(old, new, item)

    monkeypatch.setattr(held_versions, "encode", encode)
    with pytest.raises(VersionGone, match="version 4"):
        encode_deltas(base, plain)


def test_the_item_is_that_of_most_bytes() -> None:
    bucket, descriptor = seal(b"ab", "t")
    os.close(descriptor)
    for tensors, expected in (
        ([("float32", 10), ("bfloat16", 21)], 2),
        ([("float32", 11), ("bfloat16", 21)], 4),
        ([], 1),
    ):
        specs, _ = layout([(f"t{i}", dtype, (count,)) for i, (dtype, count) in enumerate(tensors)])
        assert item_bytes(replace(bucket, tensors=specs)) == expected

"""Deltas are exact to the bit, small where little has changed, and nothing but themselves can be decoded."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from published_weights import random_bytes, stepped

from asyncrl.weights import delta
from asyncrl.weights.delta import decode, encode

HEADER = struct.Struct("<4sB3xQ")


def decoded(encoded: bytes, base: bytes) -> bytes:
    out = bytearray(len(base))
    decode(encoded, base, out)
    return bytes(out)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short buffers have several, whose borders fall within items."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 100)


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    base = draw(st.binary(max_size=700))
    new = bytearray(base)
    if base:
        for at, value in draw(st.lists(st.tuples(st.integers(0, len(base) - 1), st.integers(0, 255)), max_size=40)):
            new[at] = value
    return base, bytes(new)


@given(versions=two_versions(), item_bytes=st.sampled_from([1, 2, 3, 4, 7, 8, 64]))
def test_every_bit_comes_back(versions: tuple[bytes, bytes], item_bytes: int) -> None:
    base, new = versions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "PAYS_BELOW", 1000.0)
        encoded = encode(base, new, item_bytes)
    if encoded is None:
        assert len(base) == 0
    else:
        assert decoded(encoded, base) == new


@given(base=st.binary(min_size=1, max_size=3000), seed=st.integers(0, 9), item_bytes=st.sampled_from([1, 2, 4]))
def test_nothing_is_returned_unless_it_pays(base: bytes, seed: int, item_bytes: int) -> None:
    assert encode(base, random_bytes(len(base), seed), item_bytes) is None
    same = encode(base, base, item_bytes)
    if same is not None:
        assert len(same) <= 0.9 * len(base)
        assert decoded(same, base) == base


def test_a_step_of_bfloat16_is_small_whatever_the_length_and_memory_bounded_by_the_block(monkeypatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_BYTES", 1 << 18)
    size = (4 << 20) + 3
    base = random_bytes(size)
    new, out = stepped(base), bytearray(size)
    encoded = encode(base, new, 2)
    assert encoded is not None and len(encoded) < 0.1 * size
    tracemalloc.start()
    try:
        decode(encoded, base, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert out == new


@given(versions=two_versions(), cut=st.integers(0, 10_000), item_bytes=st.sampled_from([1, 2, 4]))
def test_what_was_cut_or_lengthened_is_an_error(versions: tuple[bytes, bytes], cut: int, item_bytes: int) -> None:
    base, new = versions
    encoded = encode(base, new, item_bytes)
    if encoded is not None:
        with pytest.raises(ValueError, match="no delta|it ends"):
            decoded(encoded[: cut % len(encoded)], base)
        with pytest.raises(ValueError, match="follow its end"):
            decoded(encoded + b"\0", base)


@given(versions=two_versions(), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1))
def test_whatever_is_decoded_ends_or_is_an_error(versions: tuple[bytes, bytes], flips: list[tuple[int, int]]) -> None:
    base, new = versions
    encoded = bytearray(encode(base, new, 2) or HEADER.pack(b"xpz1", 2, len(base)))
    for at, bit in flips:
        encoded[at % len(encoded)] ^= 1 << bit
    with suppress(ValueError):
        decoded(bytes(encoded), base)


def test_a_block_that_says_it_is_larger_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    encoded = HEADER.pack(b"xpz1", 1, 50) + struct.pack("<I", len(bomb)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a block of 67108864 bytes instead of 50"):
            decoded(encoded, bytes(50))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (HEADER.pack(b"xpz2", 2, 50), "as no delta does"),
        (HEADER.pack(b"xpz1", 2, 51), "a delta of 51 bytes for a bucket of 50"),
        (HEADER.pack(b"xpz1", 2, 50), "ends before the block at 0"),
        (HEADER.pack(b"xpz1", 2, 50) + struct.pack("<I", 9) + b"x", "ends within the block at 0"),
        (HEADER.pack(b"xpz1", 2, 50) + struct.pack("<I", 9) + bytes(9), "cannot be decompressed"),
    ],
)
def test_errors_say_what_is_wrong(encoded: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoded(encoded, bytes(50))


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="a base of 3 bytes for a bucket of 4"):
        encode(bytes(3), bytes(4), 2)
    with pytest.raises(ValueError, match="a base of 3 bytes for a bucket of 4"):
        decode(b"", bytes(3), bytearray(4))
    with pytest.raises(ValueError, match="an item of 0 bytes"):
        encode(bytes(4), bytes(4), 0)
    assert encode(b"", b"", 2) is None

"""Deltas: the bytes of one version of a bucket, encoded against those of an earlier one. Exact to the bit.

Between two versions most parameters change in their last bits, if at all. The two are combined by exclusive or, and
the bytes of the items are taken apart into planes (all first bytes, then all second ones): bytes that change rarely
(sign, exponent, high bits) become long runs of zeros, which zstandard makes small at the speed of a disk.

    header   magic, bytes of an item, bytes of the bucket
    block*   encoded size, zstandard frame; a size of 0 is a block in which nothing has changed

A block is BLOCK_BYTES of the bucket, the last one the rest, and is encoded by itself: memory stays bounded by it.
Bytes behind the last whole item follow the planes as they are. There is no checksum: a delta applied to another base
gives other bytes without a word, and the caller of ``decode`` compares the bucket's own.

Fails with ValueError for bytes that are no delta of a bucket of this size. Both directions block; numpy and zstandard
release the interpreter's lock for blocks of this size, so they are run in threads.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 4 << 20
PAYS_BELOW = 0.9
"""Share of the bucket's size that a delta must stay under, or it is not worth its decoding."""
MAX_ITEM_BYTES = 64
LEVEL = 1
"""Level of zstandard; higher ones take longer and find no more here."""

_HEADER = struct.Struct("<4sB3xQ")
_ENCODED_SIZE = struct.Struct("<I")
_MAGIC = b"xpz1"

Bytes = NDArray[np.uint8]


def encode(base: Buffer, new: Buffer, item_bytes: int) -> bytes | None:
    """Delta of ``new`` against ``base``, or None where it is not smaller than PAYS_BELOW of ``new``.

    ``item_bytes`` is the size of the numbers in the bucket (2 for bfloat16). Raises ValueError where the sizes differ.
    """
    if not 1 <= item_bytes <= MAX_ITEM_BYTES:
        raise ValueError(f"an item of {item_bytes} bytes; 1 to {MAX_ITEM_BYTES} are possible")
    before, after = _bytes(base), _bytes(new)
    if before.size != after.size:
        raise ValueError(f"a base of {before.size} bytes for a bucket of {after.size}")
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    parts: list[bytes] = [_HEADER.pack(_MAGIC, item_bytes, after.size)]
    encoded, most = _HEADER.size, int(PAYS_BELOW * after.size)
    for start, end in _blocks(after.size, item_bytes):
        changed = np.bitwise_xor(before[start:end], after[start:end])
        frame = compressor.compress(_into_planes(changed, item_bytes).data) if changed.any() else b""
        parts += (_ENCODED_SIZE.pack(len(frame)), frame)
        encoded += _ENCODED_SIZE.size + len(frame)
        if encoded > most:
            return None
    return b"".join(parts) if encoded <= most else None


def decode(delta: Buffer, base: Buffer, out: Buffer) -> None:
    """Write the bucket into ``out``, which is as large as ``base``. Raises ValueError; part of ``out`` is then written.

    Needs memory for two blocks, also for a ``delta`` that claims more.
    """
    encoded, before, after = _bytes(delta), _bytes(base), _bytes(out)
    if before.size != after.size:
        raise ValueError(f"a base of {before.size} bytes for a bucket of {after.size}")
    if encoded.size < _HEADER.size:
        raise ValueError(f"{encoded.size} bytes are no delta")
    magic, item_bytes, size = _HEADER.unpack_from(encoded.data)
    if magic != _MAGIC or not 1 <= item_bytes <= MAX_ITEM_BYTES:
        raise ValueError(f"it begins with {bytes(encoded[: _HEADER.size]).hex()}, as no delta does")
    if size != after.size:
        raise ValueError(f"a delta of {size} bytes for a bucket of {after.size}")
    decompressor = zstandard.ZstdDecompressor()
    at = _HEADER.size
    for start, end in _blocks(size, item_bytes):
        if at + _ENCODED_SIZE.size > encoded.size:
            raise ValueError(f"it ends before the block at {start}")
        (length,) = _ENCODED_SIZE.unpack_from(encoded.data, at)
        at += _ENCODED_SIZE.size
        if at + length > encoded.size:
            raise ValueError(f"it ends within the block at {start}")
        if not length:
            np.copyto(after[start:end], before[start:end])
            continue
        planes = _decompress(decompressor, encoded[at : at + length], end - start)
        at += length
        np.bitwise_xor(before[start:end], _out_of_planes(planes, item_bytes), out=after[start:end])
    if at != encoded.size:
        raise ValueError(f"{encoded.size - at} bytes follow its end")


def _bytes(buffer: Buffer) -> Bytes:
    view = memoryview(buffer).cast("B")
    return np.frombuffer(view, np.uint8)


def _blocks(size: int, item_bytes: int) -> list[tuple[int, int]]:
    # Blocks are of whole items, so that only the last one has bytes behind its planes.
    step = BLOCK_BYTES // item_bytes * item_bytes
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _into_planes(block: Bytes, item_bytes: int) -> Bytes:
    if item_bytes == 1:
        return block
    count = block.size // item_bytes
    whole = count * item_bytes
    planes = np.empty_like(block)
    for byte in range(item_bytes):
        planes[byte * count : (byte + 1) * count] = block[byte:whole:item_bytes]
    planes[whole:] = block[whole:]
    return planes


def _out_of_planes(planes: Bytes, item_bytes: int) -> Bytes:
    if item_bytes == 1:
        return planes
    count = planes.size // item_bytes
    whole = count * item_bytes
    block = np.empty_like(planes)
    for byte in range(item_bytes):
        block[byte:whole:item_bytes] = planes[byte * count : (byte + 1) * count]
    block[whole:] = planes[whole:]
    return block


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: Bytes, size: int) -> Bytes:
    try:
        # zstandard allocates the size that the frame says of itself: it is looked at first.
        stated = zstandard.frame_content_size(frame.data)
        if stated != size:
            raise ValueError(f"a block of {stated} bytes instead of {size}")
        content = decompressor.decompress(frame.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a block that cannot be decompressed: {error}") from None
    if len(content) != size:
        raise ValueError(f"a block of {len(content)} bytes instead of {size}")
    return np.frombuffer(content, np.uint8)

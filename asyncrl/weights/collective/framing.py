"""Frames that the members of a broadcast exchange, byte by byte, and the order in which they may come. Pure.

Frames travel over the links (links.py) between rank 0 and each member; the weights themselves do not. A frame is

    magic, kind, bytes of text, index, number, size, checksum     HEADER.size bytes, little-endian
    text                                                          at most MAX_TEXT bytes

and a broadcast is

    member → rank 0   HELLO    number: epoch, index: rank, size: members of the group, text: its token
    rank 0 → member   BEGIN    number: epoch, text: invitation to the group     (both once in an epoch)
    rank 0 → member   OPEN     number: version, index: buckets, size: bytes, checksum: xxh3_64 of the layouts
    rank 0 → member   BUCKET   number: version, index: of the bucket, size, checksum: xxh3_64; then its bytes.
                               LAST instead of BUCKET for the last one
    member → rank 0   DONE     number: version; it has verified what it received
    any time, either  ABORT    text: the reason; nothing follows

so that neither side can take the bytes of one bucket, version or set of layouts for those of another. Nothing is
unpickled. Fails with ValueError for frames that are none, and for those that are not the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import xxhash

from asyncrl.messages.weights import Bucket, BucketLayout

MAX_TEXT = 1024
HEADER = struct.Struct("<4sBxHIQQQ")
MAGIC = b"axw1"


class FrameKind(IntEnum):
    """Kind of a frame; the table above has each."""

    HELLO = 1
    BEGIN = 2
    OPEN = 3
    BUCKET = 4
    LAST = 5
    DONE = 6
    ABORT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame; the table above tells the fields of each kind."""

    kind: FrameKind
    number: int = 0
    index: int = 0
    size: int = 0
    checksum: int = 0
    text: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; a longer text is cut."""
    text = frame.text[:MAX_TEXT]
    header = HEADER.pack(MAGIC, frame.kind, len(text), frame.index, frame.number, frame.size, frame.checksum)
    return header + text


class Decoder:
    """Decoder of bytes, as they come, to whole frames. Holds at most one frame's bytes beyond those that it was fed."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Frames that ``data`` completes, in order. Raises ValueError for bytes that are no frame."""
        self._held += data
        frames = []
        while len(self._held) >= HEADER.size:
            magic, kind, length, index, number, size, checksum = HEADER.unpack_from(self._held)
            if magic != MAGIC or kind not in FrameKind._value2member_map_ or length > MAX_TEXT:
                raise ValueError(f"{bytes(self._held[: HEADER.size]).hex()} begins no frame of a broadcast")
            end = HEADER.size + length
            if len(self._held) < end:
                break
            text = bytes(self._held[HEADER.size : end])
            frames.append(
                Frame(kind=FrameKind(kind), number=number, index=index, size=size, checksum=checksum, text=text)
            )
            del self._held[:end]
        return frames


def abort(reason: str) -> Frame:
    """The frame that ends everything."""
    return Frame(kind=FrameKind.ABORT, text=reason.encode()[:MAX_TEXT])


def bytes_of(layout: BucketLayout) -> int:
    """Bytes that are transferred of a bucket: as its segment, it has at least one."""
    return max(layout.size, 1)


def opening(version: int, layouts: Sequence[BucketLayout]) -> Frame:
    """The frame before the first bucket."""
    return Frame(
        kind=FrameKind.OPEN,
        number=version,
        index=len(layouts),
        size=sum(map(bytes_of, layouts)),
        checksum=xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(list(layouts))),
    )


def heading(version: int, index: int, checksum: int, layouts: Sequence[BucketLayout]) -> Frame:
    """The frame before bucket ``index``, which has ``checksum``."""
    kind = FrameKind.LAST if index == len(layouts) - 1 else FrameKind.BUCKET
    return Frame(kind=kind, number=version, index=index, size=bytes_of(layouts[index]), checksum=checksum)


def check_bucket(bucket: Bucket, index: int, layouts: Sequence[BucketLayout]) -> None:
    """Raise ValueError unless ``bucket`` is laid out as bucket ``index`` was announced."""
    if index >= len(layouts):
        raise ValueError(f"there is a bucket {index}, but {len(layouts)} were announced")
    layout = layouts[index]
    if bucket.size != bytes_of(layout) or bucket.tensors != layout.tensors:
        raise ValueError(
            f"bucket {index} has {bucket.size} bytes and {len(bucket.tensors)} tensors, not the {bytes_of(layout)} "
            f"bytes and {len(layout.tensors)} tensors that were announced, or others"
        )


def check(frame: Frame, expected: Frame) -> None:
    """Raise ValueError unless ``frame`` is the one that is expected."""
    if frame != expected:
        raise ValueError(f"expected {_shown(expected)}, not {_shown(frame)}")


def _shown(frame: Frame) -> str:
    match frame.kind:
        case FrameKind.OPEN:
            what = f"version {frame.number} in {frame.index} buckets of {frame.size} bytes, {frame.checksum:#018x}"
        case FrameKind.BUCKET | FrameKind.LAST:
            what = f"version {frame.number}, bucket {frame.index} of {frame.size} bytes"
        case _:
            what = f"{frame.number}, {frame.index}, {frame.size}"
    return f"{frame.kind.name} ({what})"


def pieces(size: int, piece_bytes: int) -> list[tuple[int, int]]:
    """[start, end) of the parts, none larger than ``piece_bytes``, in which ``size`` bytes are transferred."""
    return [(start, min(start + piece_bytes, size)) for start in range(0, size, piece_bytes)]

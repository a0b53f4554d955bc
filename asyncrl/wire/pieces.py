"""Messages in pieces: how a large one gets into a server that takes no large frame. Pure.

ZeroMQ has one limit for the frames of a connection, and it holds before a peer has proved who it is. So under CURVE a
server takes frames of no more than PIECE_BYTES, and a client sends what is larger in pieces: first a table (MARK, then
how many pieces each frame has, 4 bytes each, little-endian), then the pieces of all frames, in order. A message
that fits goes as it is.
Invariant: what is joined is what was cut. Fails with ValueError for a table that does not fit what follows it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

PIECE_BYTES = 1 << 18
MARK = b"\0"
"""No header begins like this: a header is a MessagePack array."""
CURVE_BYTES = 256
"""More than CURVE adds to a frame."""


def cut(frames: Sequence[Any]) -> Sequence[Any]:
    """The frames, in pieces where one of them is too large."""
    views = [memoryview(frame) for frame in frames]
    if all(view.nbytes <= PIECE_BYTES for view in views):
        return frames
    pieces: list[Any] = []
    counts = []
    for view in views:
        # One without a byte cannot be cast.
        data = view.cast("B") if view.nbytes else b""
        # A frame without a byte is one piece: no count is 0.
        starts = range(0, max(1, len(data)), PIECE_BYTES)
        pieces += [data[at : at + PIECE_BYTES] for at in starts]
        counts.append(len(starts))
    return [MARK + struct.pack(f"<{len(counts)}I", *counts), *pieces]


def joined(frames: Sequence[Any], most_bytes: int) -> list[Any]:
    """The frames that were cut, up to ``most_bytes`` in all; the first two as bytes."""
    table, *pieces = frames
    counts = struct.unpack(f"<{(len(table) - 1) // 4}I", table[1:])
    if not counts or sum(counts) != len(pieces) or 0 in counts:
        raise ValueError(f"a table of {sum(counts)} pieces before {len(pieces)}")
    if sum(len(piece) for piece in pieces) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes in pieces")
    found: list[Any] = []
    at = 0
    for count in counts:
        of = pieces[at : at + count]
        at += count
        found.append(of[0] if count == 1 and len(found) > 1 else b"".join(of))
    return found

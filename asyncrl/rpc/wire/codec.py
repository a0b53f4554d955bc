"""Typed bodies and their arrays.

A body is a msgspec struct as a MessagePack map, validated against its annotations. Arrays (numpy) never pass through
MessagePack: each is a frame of its own, and the body holds ``[dtype, shape, frame]`` in its place. Sending passes the
array's memory to the transport, and receiving returns a view of the frame. Neither copies, so an array must not be
written to after it was sent. This imports numpy with the first array, so processes without arrays start sooner, as the
launcher and the agents do.

ZeroMQ has one limit for the frames of a connection, which holds even before a peer has proved its identity. So under
CURVE a server accepts frames of at most PIECE_BYTES, and a client *cuts* a message with a larger frame. The first frame
is then a table: MARK, and the number of pieces of each frame (uint32, little-endian). The pieces of all frames follow
in order. Invariant: ``join`` restores the frames that ``cut`` was given.

Fails with ProtocolError when a body does not fit its type or an array its frame. ``join`` fails with ValueError or
struct.error if a table does not fit the pieces.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from asyncrl.core.errors import ProtocolError

assert sys.byteorder == "little", "arrays travel in little-endian order"

T = TypeVar("T")

DTYPES = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64".split()  # noqa: SIM905
)
MAX_DIMENSIONS = 8
PIECE_BYTES = 1 << 18
MARK = b"\0"
"""First byte of a table. No header begins like this: a header is a MessagePack array."""
CURVE_BYTES = 256
"""More than CURVE adds to a frame."""


class Codec:
    """Encodes and decodes bodies. Not thread-safe: each thread has its own."""

    def __init__(self) -> None:
        self._outgoing: list[Any] = []
        """Buffers of the arrays of the message that is being encoded."""
        self._incoming: Sequence[Any] = ()
        """Buffers of the arrays of the message that is being decoded."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}

    def encode(self, message: Any) -> list[Any]:
        """Returns the frames to send: the body, then one buffer for each array.

        Raises ProtocolError for an integer beyond 64 bits, and TypeError for a value that no message may hold.
        """
        try:
            return [self._encoder.encode(message), *self._outgoing]
        except OverflowError as error:
            raise ProtocolError(f"body of {type(message).__name__}: {error}") from None
        finally:
            # Also after an error: the next message must not contain these arrays.
            if self._outgoing:
                self._outgoing = []

    def decode(self, kind: type[T], body: Any, buffers: Sequence[Any] = ()) -> T:
        """Reads a body as a message of type ``kind``; ``buffers`` are its arrays. Raises ProtocolError."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(
                kind, dec_hook=self._decode_array, ext_hook=_no_extension
            )
        self._incoming = buffers
        try:
            message: T = decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, MemoryError) as error:
            raise ProtocolError(f"body of {kind.__name__}: {error}") from None
        finally:
            self._incoming = ()
        return message

    def _encode_array(self, value: Any) -> Any:
        """Append an array's buffer to the outgoing frames. Returns ``[dtype, shape, frame]`` for the body."""
        import numpy as np

        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot travel in a message")
        # The name does not contain the order of bytes.
        dtype = value.dtype.name if value.dtype.isnative else value.dtype.str
        if dtype not in DTYPES:
            raise TypeError(f"arrays of {dtype} cannot travel in a message")
        # As flat bytes, whose length is their size.
        self._outgoing.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return [dtype, list(value.shape), len(self._outgoing) - 1]

    def _decode_array(self, kind: type, value: Any) -> Any:
        """Check ``[dtype, shape, frame]``, and return the array as a view of the frame. Raises ValueError."""
        import numpy as np

        if not (isinstance(value, list) and len(value) == 3):
            raise ValueError(f"expected an array as [dtype, shape, frame], got {type(value).__name__}")
        dtype, shape, index = value
        if not (isinstance(dtype, str) and dtype in DTYPES):
            raise ValueError("unknown dtype")
        if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(_is_size(n) for n in shape)):
            raise ValueError("bad shape")
        if not (_is_size(index) and index < len(self._incoming)):
            raise ValueError(f"no such frame among {len(self._incoming)}")
        buffer = self._incoming[index]
        view = memoryview(buffer if isinstance(buffer, (bytes, bytearray, memoryview)) else buffer.buffer)
        if view.nbytes != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"{dtype}{shape} does not fit a frame of {view.nbytes} bytes")
        if kind is not np.ndarray:
            raise ValueError(f"{kind.__name__} is no array type")
        return np.frombuffer(view, dtype=dtype).reshape(shape)


def encodable(text: str) -> str:
    """Escapes lone surrogates, which UTF-8 cannot hold; they come from file names that are not valid text."""
    return text.encode(errors="backslashreplace").decode()


def _no_extension(code: int, _data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


def _is_size(value: Any) -> bool:
    """Whether a value is a possible size or index: a whole number below 2^48, which is more than any memory."""
    return type(value) is int and 0 <= value < 1 << 48


def cut(frames: Sequence[Any]) -> Sequence[Any]:
    """Returns a table and pieces if any frame is over PIECE_BYTES, else the frames themselves."""
    views = [memoryview(frame) for frame in frames]
    if all(view.nbytes <= PIECE_BYTES for view in views):
        return frames
    pieces: list[Any] = []
    counts = []
    for view in views:
        # A memoryview of an empty frame cannot be cast.
        data = view.cast("B") if view.nbytes else b""
        # An empty frame is one piece, so no count is 0.
        starts = range(0, max(1, len(data)), PIECE_BYTES)
        pieces += [data[start : start + PIECE_BYTES] for start in starts]
        counts.append(len(starts))
    return [MARK + struct.pack(f"<{len(counts)}I", *counts), *pieces]


def join(frames: Sequence[Any], most_bytes: int) -> list[Any]:
    """Restores frames that were cut: header and body as bytes, then the buffers.

    Raises ValueError or struct.error if the table does not fit the pieces, and ValueError if the pieces have more than
    ``most_bytes`` in all.
    """
    table, *pieces = frames
    counts = struct.unpack(f"<{(len(table) - 1) // 4}I", table[1:])
    if not counts or sum(counts) != len(pieces) or 0 in counts:
        raise ValueError(f"a table of {sum(counts)} pieces before {len(pieces)}")
    if sum(len(piece) for piece in pieces) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes in pieces")
    joined: list[Any] = []
    start = 0
    for count in counts:
        frame_pieces = pieces[start : start + count]
        start += count
        # A buffer in one piece needs no copy; header and body must be bytes.
        joined.append(frame_pieces[0] if count == 1 and len(joined) > 1 else b"".join(frame_pieces))
    return joined

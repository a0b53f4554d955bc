"""Typed bodies and their arrays.

A body is a msgspec struct as a MessagePack map, validated against its annotations. Arrays (numpy) never pass through
MessagePack: each is a frame of its own, and the body holds ``[dtype, shape, frame]`` in its place. Sending hands over
the array's memory, receiving gives a view of the frame's; neither copies, so an array that was sent must not be written
to afterwards. numpy is imported with the first array: processes that never see one, as launcher and agent, start
sooner.

ZeroMQ has one limit for the frames of a connection, which holds before a peer has proved who it is. So under CURVE a
server takes frames of PIECE_BYTES at most, and a client sends a message with a larger one in pieces: a table (MARK,
then the number of pieces of each frame, 4 bytes each, little-endian), then the pieces of all frames in order.
Invariant: ``join`` restores what ``cut`` was given.

Fails with ProtocolError when a body does not fit its type or an array its frame; ``join`` with ValueError if a table
does not fit what follows it.
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
"""No header begins like this: a header is a MessagePack array."""
CURVE_BYTES = 256
"""More than CURVE adds to a frame."""


class Codec:
    """Encodes and decodes bodies. Not thread-safe: each thread has its own."""

    def __init__(self) -> None:
        self._outgoing: list[Any] = []
        self._incoming: Sequence[Any] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}

    def encode(self, message: Any) -> list[Any]:
        """The body and its buffers, as frames to send. Raises ProtocolError for an integer beyond 64 bits."""
        try:
            return [self._encoder.encode(message), *self._outgoing]
        except OverflowError as error:
            raise ProtocolError(f"body of {type(message).__name__}: {error}") from None
        finally:
            # Also after an error: the arrays of one message must not go along with the next.
            if self._outgoing:
                self._outgoing = []

    def decode(self, kind: type[T], body: Any, buffers: Sequence[Any] = ()) -> T:
        """Read a body as ``kind``. Raises ProtocolError."""
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
    """The text as a body can hold it: lone surrogates, as of file names that are no text, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def _no_extension(code: int, _data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


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


def join(frames: Sequence[Any], most_bytes: int) -> list[Any]:
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

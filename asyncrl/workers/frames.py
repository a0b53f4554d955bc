"""Frames between an actor and a worker process. Standard library only (keeper.py).

A frame is a length (4 bytes, little-endian) and a body, usually MessagePack. Neither side unpickles anything.
Invariant: frames arrive whole and in order. Invalid bytes raise ValueError, as msgspec's decoders do.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class FrameReader:
    """Cuts a byte stream into frames. Raises ValueError for one longer than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | bytearray]:
        """Yield the bodies of the frames that ``data`` completes."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > self._limit:
                raise ValueError(f"a frame of {size} bytes, {self._limit} are allowed")
            end = _LENGTH.size + size
            if len(self._pending) < end:
                return
            body = self._pending[_LENGTH.size : end]
            del self._pending[:end]
            yield body


def framed(*bodies: bytes) -> bytes:
    """Makes a frame of each of ``bodies``, and joins them."""
    return b"".join(part for body in bodies for part in (_LENGTH.pack(len(body)), body))


def frames(connection: socket.socket, limit: int) -> Iterator[bytes | bytearray]:
    """Yield the bodies that arrive, each of at most ``limit`` bytes, until the actor closes the socket."""
    reader = FrameReader(limit)
    while data := connection.recv(READ_BYTES):
        yield from reader.feed(data)

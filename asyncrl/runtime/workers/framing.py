"""Frames on the socket pair between an actor and one of its worker processes.

A frame is a length (4 bytes, little-endian) and a body, MessagePack as a rule. Nothing is unpickled on either side.
Fails with ValueError (msgspec's errors are such) for bytes that are none of this.
"""

from __future__ import annotations

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
        """The bodies that ``data`` completes."""
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
    """Each of ``bodies`` as a frame, one after the other."""
    return b"".join(part for body in bodies for part in (_LENGTH.pack(len(body)), body))

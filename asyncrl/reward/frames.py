"""What the pool and its workers say to each other over a socket pair.

A frame is a length (4 bytes, little-endian) and a MessagePack body. Order is the protocol: the pool sends
Setup, the worker Ready; then each Task is answered by one Result, in order. Nothing is unpickled on
either side. Fails with ValueError (msgspec's errors are such) for bytes that are none of this.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_RESULT_BYTES = 1 << 20
MAX_TASK_BYTES = 1 << 30
NO_MEMORY_EXIT = 120
"""Exit code of a worker that has not even the memory to say so."""
NO_SOCKET_EXIT = 121
"""Exit code of a worker whose socket the function has closed."""
READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """Which function the worker runs, as in the configuration, and what memory it may take beyond its own."""

    function: str
    per: str
    options: dict[str, Any]
    max_memory_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """The function can be called; or ``problems`` of the configuration, a line each, say why not."""

    problems: list[str] = []


class Task(msgspec.Struct, frozen=True, array_like=True):
    """One call of the function, or one for each completion when it scores single trajectories."""

    prompt: str
    row: dict[str, Any]
    completions: list[str]
    finish_reasons: list[str]
    conversations: list[list[dict[str, Any]]] = []
    """The messages of each completion; empty where none has any."""


class Result(msgspec.Struct, frozen=True, array_like=True):
    """Finite rewards in the order of the completions; or ``error``, and nothing else counts.

    ``last`` asks for the worker's end: it has run out of memory, and what it still holds would be the next task's loss.
    """

    rewards: list[float]
    components: list[dict[str, float]]
    run_s: float
    error: str = ""
    last: bool = False
    kind: str = ""
    """Kind of the error, as far as the worker can say: faults with the same are told once."""


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

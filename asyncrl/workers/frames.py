"""Frames between an actor and a worker process, and the actor's end of their socket. Standard library only (keeper.py).

A frame is a length (4 bytes, little-endian) and a body, usually MessagePack. Neither side unpickles anything.
Invariant: frames arrive whole and in order. Invalid bytes raise ValueError, as msgspec's decoders do.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not imported by workers, which start sooner without it.
    import asyncio

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


class WorkerSocket:
    """The actor's end of the socket to a worker process, by callbacks of the event loop.

    ``on_frame`` gets the body of each frame from the process, of at most ``max_frame_bytes``; if it raises ValueError,
    the process is killed. The owner may replace ``on_frame`` at any time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own_end: socket.socket,
        max_frame_bytes: int,
        on_frame: Callable[[bytes | bytearray], None],
    ) -> None:
        self._loop, self._socket, self.on_frame = loop, own_end, on_frame
        self._frames = FrameReader(max_frame_bytes)
        self._outgoing = memoryview(b"")
        """Bytes that wait until the socket has room."""

    def _open(self) -> None:
        """Begin to receive frames."""
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    def kill(self, reason: str) -> None:
        """Kill the process, and hang up."""
        raise NotImplementedError

    def _closed(self) -> None:
        """Called once, when the socket was closed here."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the socket is closed, so that no frames can be sent."""
        return self._socket.fileno() < 0

    def send(self, *bodies: bytes) -> None:
        """Send a frame for each of ``bodies``, with one write if the socket has room; the rest when it has."""
        if self.ended:
            return
        frames = framed(*bodies)
        if self._outgoing:
            self._outgoing = memoryview(b"".join((self._outgoing, frames)))
            return
        sent = self._write(frames)
        if sent < len(frames) and not self.ended:
            self._outgoing = memoryview(frames)[sent:]
            self._loop.add_writer(self._socket, self._write_rest)

    def _read(self) -> None:
        """Receive frames and pass them to ``on_frame``; hang up when the process has closed its end."""
        while not self.ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.hang_up()
                return
            try:
                for frame in self._frames.feed(data):
                    if not self.ended:
                        self.on_frame(frame)
            except ValueError as error:
                # The user's code has written to a descriptor that is not its own.
                self.kill(f"sent an invalid frame: {error}")
            if len(data) < READ_BYTES:
                return

    def _write(self, data: bytes | memoryview) -> int:
        """Send what the socket takes now. Returns the number of bytes; on an error, hangs up and returns 0."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.hang_up()
            return 0

    def _write_rest(self) -> None:
        self._outgoing = self._outgoing[self._write(self._outgoing) :]
        if not self._outgoing and not self.ended:
            self._loop.remove_writer(self._socket)

    def hang_up(self) -> None:
        """Close the socket, so that an idle process ends by itself."""
        if self.ended:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._outgoing = memoryview(b"")
        self._socket.close()
        self._closed()

"""The links of a broadcast: one TCP connection between rank 0 and each member, for frames and as a sign of life.

The transports cannot be trusted with that: gloo leaves an operation whose peer dies in the middle of a transfer
waiting for its whole timeout, and NCCL for ever. A link ends with its process, after any kind of death, and every wait
watches it (waiting.py).

Sockets never block. Fails with ConnectionError when the other side is gone, with the reason that it gave; with
ValueError for bytes that are no frame; with TimeoutError when a peer does not come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections import deque

from asyncrl.weights.collective.framing import Decoder, Frame, FrameKind, abort, encode

READ_BYTES = 1 << 16
BACKLOG = 1024
ANY = "0"
"""Value of network.ports for any free port."""
ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR
"""Poll events that say that the other side is gone; unread frames do not hide them."""


class Link:
    """One connection. ``name`` is the name of the other end."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        # A frame is small and waited for: it is not to be held back for another.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._socket = connection
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()

    def fileno(self) -> int:
        """Descriptor of the socket; -1 once closed."""
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """Address of this end: one of this host by which the other end can be reached."""
        address: str = self._socket.getsockname()[0]
        return address

    def send(self, frame: Frame) -> None:
        """Hand a frame to the kernel. Raises ConnectionError; also where the peer has long read nothing."""
        data = encode(frame)
        try:
            sent = self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ConnectionError(self.obituary() or f"{self.name} is gone ({error.strerror})") from error
        if sent < len(data):
            raise ConnectionError(f"{self.name} does not read what it is sent")

    def receive(self) -> Frame | None:
        """The next frame if it is there. Raises ConnectionError for the other side's ABORT and at its end."""
        if not self._frames:
            self._read()
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if frame.kind is FrameKind.ABORT:
            raise ConnectionError(self._told(frame))
        return frame

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionError(f"{self.name} is gone ({error.strerror})") from error
        if not data:
            raise ConnectionError(f"{self.name} is gone")
        try:
            self._frames += self._decoder.feed(data)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def has_done(self) -> bool:
        """Whether a DONE is among the frames still to be received: a member that sent it may leave."""
        self._drain()
        return any(frame.kind is FrameKind.DONE for frame in self._frames)

    def obituary(self) -> str:
        """Reason that the other side has ended: its own word where it left one. Empty if nothing is known."""
        self._drain()
        return next((self._told(frame) for frame in self._frames if frame.kind is FrameKind.ABORT), "")

    def _drain(self) -> None:
        """Read all bytes that have come."""
        before = -1
        with contextlib.suppress(ConnectionError, ValueError):
            # A frame is far smaller than READ_BYTES: a read that completes none has left nothing to read.
            while len(self._frames) != before:
                before = len(self._frames)
                self._read()

    def _told(self, frame: Frame) -> str:
        return f"{self.name}: {frame.text.decode(errors='replace')}"

    def hang_up(self, reason: str) -> None:
        """Tell the other side the reason that nothing follows, as far as that is still possible. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(abort(reason)), socket.MSG_NOSIGNAL)
        # Apart from the word, for which there is no room where the other side has long read nothing.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, reason: str) -> None:
        """Hang up and close. May be repeated."""
        self.hang_up(reason)
        self._socket.close()


class Listener:
    """Socket at which members find rank 0: a free port of ``host``, bound to that address alone."""

    def __init__(self, host: str, ports: str = ANY) -> None:
        self._socket = listen(host, ports)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def accept(self) -> Link | None:
        """The next connection if there is one."""
        try:
            connection, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        return Link(connection, f"{address[0]}:{address[1]}")

    def close(self) -> None:
        """Let nobody in any more. May be repeated."""
        self._socket.close()


def listen(host: str, ports: str = ANY) -> socket.socket:
    """A socket that listens at the highest free port of ``host``, bound to it alone; ``ports`` as network.ports.

    The lowest is the controller's, and is taken last: its successor needs it again.

    Raises OSError, naming the range where nothing in it is free.
    """
    low, _, high = ports.partition("-")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in reversed(range(int(low), int(high or low) + 1)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As ZeroMQ does: a connection that has just ended holds no port. Two listeners do not get the same one.
            # Where the kernel chooses the port, it takes one that nothing holds at all.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise OSError(errno.EADDRINUSE, f"no port of {ports} at {host} is free; widen network.ports")


def dial(host: str, port: int) -> socket.socket:
    """A connection that is being made; see ``dialled``. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        error = connection.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        connection.close()
        raise
    return connection


def dialled(connection: socket.socket) -> bool:
    """Whether the connection is made. Raises OSError when it cannot be."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if not poll.poll(0):
        return False
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    return True

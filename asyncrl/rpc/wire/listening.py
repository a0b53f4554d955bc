"""The listening socket of a ZeroMQ server, and a limit on the rate of new connections.

ZeroMQ accepts every connection. The kernel drops the first packet of a connection to a shut socket. Its sender repeats
it, after a second at first, and connects once the socket is open again. Open connections are not touched.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Socket options of Linux (asm-generic/socket.h); Python does not name them."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The filter "return 0", a struct sock_filter (linux/filter.h): of each packet no byte is kept."""
BURST = 4096
PER_S = 256.0
REOPENS_WITH = 64
"""Connections that may begin when the door opens again: it does not open for each by itself."""


class ListeningSocket:
    """The socket ``fd``, which stays its owner's. Close this one first: the port is free only when both are closed."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

    def shut(self) -> None:
        """Let no connection begin. May be repeated."""
        code = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
        # A struct sock_fprog: the number of instructions and where they are, padded as C pads it.
        self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))

    def open(self) -> None:
        """Let connections begin again; it was shut."""
        self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Door:
    """The rate at which connections to a server may begin, open from ``now`` (s) on. Pure.

    Each takes one from a bucket that fills up again. A handshake costs its server a thread's time and a descriptor
    before the client has proved its identity. So BURST connections may begin at once, as when a thousand actors start,
    and PER_S of them a second in the long run. Invariant: in any t seconds at most BURST + t PER_S connections begin.
    Connections that were already on their way when the door was shut come on top.
    """

    def __init__(self, now: float) -> None:
        self._left = float(BURST)
        self._looked = now

    def begin(self, now: float) -> float:
        """A connection has begun. Returns the time (s) before which no other may: ``now`` while the door stays open."""
        self._left = min(BURST, self._left + PER_S * (now - self._looked)) - 1
        self._looked = now
        return now if self._left >= 1 else now + (REOPENS_WITH - self._left) / PER_S

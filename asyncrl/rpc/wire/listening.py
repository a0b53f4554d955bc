"""The listening socket of a ZeroMQ server, and a limit on the rate of new connections.

ZeroMQ accepts every connection. So this *shuts* the listening socket for a moment with a packet filter in the kernel,
which drops the first packet of each new connection. The client's kernel repeats the packet, after a second at first,
and connects once the socket is open again. Established connections are not affected.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Socket options of Linux (asm-generic/socket.h); Python does not name them."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The packet filter "return 0", a struct sock_filter (linux/filter.h): it keeps no byte of any packet."""
BURST = 4096
PER_S = 256.0
REOPENS_WITH = 64
"""Number of connections that may begin when the socket opens again, so that it does not open for each one."""


class ListeningSocket:
    """A duplicate of the listening socket ``fd``. Close it before ``fd``: the port is free once both are closed."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

    def shut(self) -> None:
        """Let no new connection begin. May be called again."""
        code = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
        # A struct sock_fprog: the number of instructions and their address, with the padding of C.
        self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))

    def open(self) -> None:
        """Let new connections begin again after ``shut``."""
        self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Close the duplicate."""
        self._socket.close()


class Door:
    """Limits the rate at which connections begin, with a token bucket that starts full at ``now`` (s). Pure.

    A handshake costs the server a thread's time and a descriptor before the client has proved its identity. So BURST
    connections may begin at once, as when a thousand actors start, and PER_S of them a second in the long run.
    Invariant: in any t seconds at most BURST + t PER_S connections begin. Connections that were already on their way
    when the socket was shut come on top.
    """

    def __init__(self, now: float) -> None:
        self._tokens = float(BURST)
        """Number of connections that may begin now."""
        self._counted_at = now
        """Time of the last connection (s)."""

    def begin(self, now: float) -> float:
        """Count a connection that has begun. Returns the time until which to shut the socket (s); ``now`` if not."""
        self._tokens = min(BURST, self._tokens + PER_S * (now - self._counted_at)) - 1
        self._counted_at = now
        return now if self._tokens >= 1 else now + (REOPENS_WITH - self._tokens) / PER_S

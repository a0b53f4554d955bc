"""A worker process from the inside: its start, its frames, its signals and its end. Standard library only (keeper.py).

Invariant: only its actor, the user's code or the kernel ends a worker, and a worker ends with its actor. It ignores
signals that are sent to the whole job. Programs that the user's code starts are descendants of the worker, so they end
with it.

Actor and worker exchange frames. A frame is a length (4 bytes, little-endian) and a body, usually MessagePack. Neither
side unpickles anything. Invariant: frames arrive whole and in order. Invalid bytes raise ValueError, as msgspec's
decoders do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from asyncrl.rpc.linux import become_subreaper, die_with_parent
from asyncrl.workers import isolation

NO_MEMORY_EXIT = 120
"""Exit code of a worker without the memory for a report."""
NO_SOCKET_EXIT = 121
"""Exit code of a worker whose socket the user's code has closed."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the whole job, on which the actor decides. Handlers, unlike SIG_IGN, are not passed on to programs."""
READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


def end(code: int) -> NoReturn:
    """End the process at once: without cleanup, which may need memory or wait for threads of the user's code."""
    os._exit(code)


def begin(title: str) -> socket.socket:
    """Prepare this process for users' code and return the socket to the actor; ``title`` is for ps.

    The process ends with its parent and ignores signals that are sent to the whole job. When memory runs out, the
    kernel kills it first. Processes of the users' code stay its descendants, so the actor can end them all together.
    Users' modules are also found in the working directory.
    """
    isolation.obey(sys.argv[1:])
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Programs must not inherit the socket, or the actor would not see that this process has ended.
    connection.set_inheritable(False)
    if sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
        become_subreaper()
        # A worker that wakes up waits for its core, so it does not interrupt its actor or an engine.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    for number in IGNORED:
        signal.signal(number, lambda *_: None)
    _reset_forked_children(connection.close)
    _set_title(title)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return connection


def _reset_forked_children(close: Callable[[], None]) -> None:
    """In children that users' code forks, call ``close`` and restore the default action of the signals IGNORED."""

    def in_child() -> None:
        close()
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)

    # Blocked during the fork, so that a signal for the child does not meet the handler that ignores it.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED),
        after_in_child=in_child,
    )


def _set_title(title: str) -> None:
    import setproctitle

    setproctitle.setproctitle(title)


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

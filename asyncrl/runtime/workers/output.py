"""The output of a worker and of the processes that it starts, taken off them without ever holding them up.

Both outputs are one pipe. Invariant: of what is printed in one call at most ``limit`` bytes are kept, in order; all
else is thrown away unread and counted. Holding the pipe cannot fail; making it can, with OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

PIPE_BYTES = 1 << 20
"""Size of a pipe that is asked of the kernel; it may give less to one who holds many."""
ROUNDS = 64
"""Turns of one drain, so that a worker that never stops printing holds up nobody else."""


class Output:
    """The reading end; ``write_fd`` is for the process and closed by ``started``.

    ``tail`` is the end of all that was printed, of ``tail_bytes``.
    """

    def __init__(self, limit: int, *, tail_bytes: int = 0) -> None:
        self._tail_bytes = tail_bytes
        self.tail = b""
        self._limit = limit
        self._kept = bytearray()
        self._left = limit
        self._dropped = 0
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self.used = False
        """Whether anything was ever printed."""

    def started(self) -> None:
        """The process has its end."""
        os.close(self.write_fd)

    def drain(self, rounds: int = ROUNDS) -> bool:
        """Take what is there; False at the end of the output."""
        try:
            for _ in range(rounds):
                if not self._take():
                    return False
        except BlockingIOError:
            pass
        return True

    def _take(self) -> int:
        self.used = True
        if self._left:
            data = os.read(self.read_fd, min(self._left, PIPE_BYTES))
            self._kept += data
            self._left -= len(data)
            self._end_with(data)
            return len(data)
        if self._tail_bytes:
            data = os.read(self.read_fd, PIPE_BYTES)
            self._dropped += len(data)
            self._end_with(data)
            return len(data)
        # Thrown away by the kernel, without a copy.
        size = os.splice(self.read_fd, self._nowhere, PIPE_BYTES)
        self._dropped += size
        return size

    def _end_with(self, data: bytes) -> None:
        if self._tail_bytes:
            self.tail = (self.tail + data[-self._tail_bytes :])[-self._tail_bytes :]

    def take(self, *, end_of_call: bool) -> tuple[str, int]:
        """Text kept since the last time, and at the end of a call the number of bytes more that it has printed."""
        text = self._kept.decode(errors="replace")
        self._kept.clear()
        dropped = 0
        if end_of_call:
            dropped, self._dropped, self._left = self._dropped, 0, self._limit
        return text, dropped

    def close(self) -> None:
        """Nobody listens any more."""
        os.close(self.read_fd)
        os.close(self._nowhere)

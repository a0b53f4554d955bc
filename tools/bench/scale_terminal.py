"""The reading end of a terminal: ``python -m tools.bench.scale_terminal FD``.

In a process of its own, for a thread among others is late by as long as these hold the interpreter, a collection of all
garbage for one. Writes the time of each read, a double in the order of the machine (s, of time.monotonic, which is that
of all processes), and ends with the terminal.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import time

_TIME = struct.Struct("d")


class Terminal:
    """Reads the descriptor, which it takes over, until the other end is closed."""

    def __init__(self, descriptor: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.scale_terminal", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            process_group=0,
        )
        os.close(descriptor)
        assert self._process.stdout is not None
        self._times = self._process.stdout
        os.set_blocking(self._times.fileno(), False)

    def read(self) -> list[float]:
        """Times at which something came since the last call."""
        found: list[float] = []
        with contextlib.suppress(BlockingIOError):
            # Whole times: each is written at once.
            while data := os.read(self._times.fileno(), 1024 * _TIME.size):
                found += [at for (at,) in _TIME.iter_unpack(data)]
        return found

    def close(self) -> None:
        """End the reader, once the other end is closed."""
        self._process.kill()
        self._process.wait()
        self._times.close()


def main() -> None:
    """Read until the terminal ends."""
    descriptor = int(sys.argv[1])
    # The other end is gone, or the reader of the times.
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            os.write(sys.stdout.fileno(), _TIME.pack(time.monotonic()))


if __name__ == "__main__":
    main()

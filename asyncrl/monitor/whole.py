"""Writing at the end of a file as a whole or not at all: what a full disk has torn is cut off again."""

from __future__ import annotations

import os


def append_whole(descriptor: int, data: bytes | memoryview) -> None:
    """Write ``data`` through a descriptor that was opened to append. Raises OSError; the file is then as before.

    Not through a buffer: that of a file keeps what a full disk refused, and writes it when the file is closed.
    """
    size = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise

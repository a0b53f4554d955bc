"""Writing a file, or at the end of one, as a whole or not at all: what a full disk has torn is taken away again.

A reader sees the whole of what was written, or what was there before; what a loss of power leaves is not known. Fails
with OSError.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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


def replace_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Put a file with ``text`` (UTF-8) in the place of what is there, if anything; nobody but the owner may read a
    ``private`` one. Raises OSError; all is then as before.
    """
    data, aside = text.encode(), path.with_name(path.name + ".new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise

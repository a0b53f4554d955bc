"""Disks without room: recognised in the errors that they cause, and told in words.

A full disk comes as ENOSPC or EDQUOT of the call that met it, and as errors of libraries above that call: those in
Rust keep its number in their text, and torch's writer of archives complains of its own position instead. The words for
people name the disk, the bytes that are free there and the bytes that are needed.

Fails with nothing: where the operating system does not say how much is free, the number is None.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC: "no space left on", errno.EDQUOT: "the disk quota is used up on"}
_NUMBERED = re.compile(rf"\bos error ({'|'.join(map(str, FULL))})\b")
_TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter failed writing")
_A_BLOCK = 1 << 16
"""Bytes; fewer are free on a disk that has torn a file of torch's writer."""


def full_errno(error: BaseException, path: Path | None = None) -> int:
    """ENOSPC or EDQUOT if that is why ``error`` was raised, else 0.

    ``path`` is the place of the write: it decides where the error does not say what led to it.
    """
    torn = False
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in FULL:
            return link.errno
        text = str(link)
        if numbered := _NUMBERED.search(text):
            return int(numbered[1])
        torn = torn or _TORCH_WRITER.search(text) is not None
    if torn and path is not None:
        free = free_bytes(path)
        return errno.ENOSPC if free is not None and free < _A_BLOCK else 0
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all errors that led to it."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [before for before in (link.__cause__, link.__context__) if before is not None]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def nearest_folder(path: Path) -> Path:
    """The path itself, or the first one above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write where ``path`` is or would be; None where nobody knows."""
    try:
        room = os.statvfs(nearest_folder(path))
    except OSError:
        return None
    # Some file systems over a network do not count.
    return room.f_bavail * room.f_frsize if room.f_blocks else None


def no_room(path: Path, number: int = errno.ENOSPC, *, needed: int | None = None) -> str:
    """``no space left on PATH: N free, about M needed``."""
    free = free_bytes(path)
    parts = [] if free is None else [f"{in_bytes(free)} free"]
    if needed is not None:
        parts.append(f"about {in_bytes(needed)} needed")
    return f"{FULL[number]} {path}" + (f": {', '.join(parts)}" if parts else "")


def in_words(error: OSError, path: Path) -> str:
    """The refusal of the operating system, at ``path`` or at the file that the error names, in words."""
    where = Path(error.filename) if isinstance(error.filename, str) else path
    if number := full_errno(error, where):
        return no_room(where, number)
    return f"{where}: {error.strerror or error}"


def in_bytes(count: float) -> str:
    """A number of bytes for people, as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

"""Recognises errors that a full disk has caused, and describes them to the user.

A system call on a full disk fails with ENOSPC or EDQUOT. Libraries above it raise errors of their own. Those in Rust
keep the number in their text ("os error 28"). The writer of torch's archives complains about its position instead.
Descriptions name the disk, the bytes that are free there and, if the caller knows them, the bytes that are needed.

Never fails. Where the operating system does not say how much is free, the number is missing.
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
_NEARLY_FULL_BYTES = 1 << 16
"""An error of torch's writer counts as a full disk if fewer bytes than this are free."""


def full_errno(error: BaseException, path: Path | None = None) -> int:
    """Return ENOSPC or EDQUOT if a full disk has caused ``error``, else 0.

    Looks for the number in the error and in all errors that led to it. An error of torch's writer has no number: it
    counts as ENOSPC if the disk of ``path``, the file being written, is nearly full.
    """
    from_torch_writer = False
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in FULL:
            return link.errno
        text = str(link)
        if numbered := _NUMBERED.search(text):
            return int(numbered[1])
        from_torch_writer = from_torch_writer or _TORCH_WRITER.search(text) is not None
    if from_torch_writer and path is not None:
        free = free_bytes(path)
        return errno.ENOSPC if free is not None and free < _NEARLY_FULL_BYTES else 0
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, the members of groups among them, and so on, each once."""
    pending, seen = [error], set[int]()
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [cause for cause in (link.__cause__, link.__context__) if cause is not None]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions


def nearest_folder(path: Path) -> Path:
    """Return the absolute path if it exists, else its nearest ancestor that exists."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may write on the disk of ``path``, which need not exist; None if unknown."""
    try:
        disk = os.statvfs(nearest_folder(path))
    except OSError:
        return None
    # Some file systems over a network do not count.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def no_room(path: Path, number: int = errno.ENOSPC, *, needed: int | None = None) -> str:
    """Describe a full disk: ``no space left on PATH: N free, about M needed``. ``number`` is ENOSPC or EDQUOT."""
    free = free_bytes(path)
    parts = [] if free is None else [f"{in_bytes(free)} free"]
    if needed is not None:
        parts.append(f"about {in_bytes(needed)} needed")
    return f"{FULL[number]} {path}" + (f": {', '.join(parts)}" if parts else "")


def in_words(error: OSError, path: Path) -> str:
    """Describe an error of the operating system; ``path`` is used if the error names no file."""
    where = Path(error.filename) if isinstance(error.filename, str) else path
    if number := full_errno(error, where):
        return no_room(where, number)
    return f"{where}: {error.strerror or error}"


def in_bytes(count: float) -> str:
    """Format a number of bytes, as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

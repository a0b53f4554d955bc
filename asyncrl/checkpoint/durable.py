"""Files that outlive a power cut: written, flushed to the disk, and held against their checksum when read.

A file is durable once it and the folder that names it have been flushed; the functions say which of the two they do.

Fails with OSError, as the operating system says it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from asyncrl.disk import full_errno
from asyncrl.errors import CheckpointError

CHUNK_BYTES = 4 << 20


def refused(path: Path, error: OSError) -> CheckpointError:
    """Error of a checkpoint that the operating system refuses, naming the file of ``error``, or ``path``."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    return CheckpointError(where, error.strerror or str(error), full=full_errno(error))


class Digest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file when it was written."""

    bytes: int
    xxh3_128: str
    """Checksum of all bytes, in hexadecimal."""


def write_file(path: Path, chunks: Iterable[bytes]) -> Digest:
    """Write a file that is not there yet and flush it. The folder is the caller's to flush."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    hasher, size = xxhash.xxh3_128(), 0
    try:
        for chunk in chunks:
            hasher.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Digest(size, hasher.hexdigest())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in place of the one that is there; a reader sees either the old or the new one. Durable."""
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    try:
        write_file(aside, [data])
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names that a folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> Digest:
    """Digest of a whole file, which is read."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return Digest(size, hasher.hexdigest())


def difference(path: Path, written: Digest) -> str | None:
    """Difference of a file from the one that was written; None if there is none. Raises OSError."""
    found = digest_file(path)
    if found == written:
        return None
    if found.bytes != written.bytes:
        return f"has {found.bytes} bytes instead of {written.bytes}"
    return "does not hold what was written (its checksum differs)"

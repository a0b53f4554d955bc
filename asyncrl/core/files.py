"""Writes files whole or not at all, makes them durable, compares them with their checksums, and locks them.

A file is durable, so that it outlives a power cut, once it and its folder are flushed. Each function says which of the
two it flushes. A lock is flock's, on a file that serves no other purpose; the kernel releases it when its process ends.
``KeptWrites`` keeps records in memory while a full disk refuses them. ``find_source`` finds the file of a user's module
without importing it. JSON from an unknown source raises ValueError for any fault.

Fails with OSError, as the operating system says it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec
import xxhash

FILE_SUFFIX = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|txt|arrow|gz|zst|safetensors|bin|gguf|pt)$", re.IGNORECASE)
"""Suffix of a file's name. A name with such a suffix is not that of a repository of the hub."""

CHUNK_BYTES = 4 << 20
LOCAL_LOCKS = re.compile(r"\b(local_lock=(all|flock)|localflock|nolock)\b")
"""Mount options with which a host does not see the locks of other hosts."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Digest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file at the time when it was written."""

    bytes: int
    xxh3_128: str
    """Checksum of all bytes, in hexadecimal."""


def write_file(path: Path, chunks: Iterable[bytes]) -> Digest:
    """Create a file from ``chunks`` and flush it; the caller flushes the folder. Raises OSError if the file exists."""
    descriptor = os.open(path, _NEW, 0o644)
    hasher, size = xxhash.xxh3_128(), 0
    try:
        for chunk in chunks:
            hasher.update(chunk)
            size += len(chunk)
            write_all(descriptor, chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Digest(size, hasher.hexdigest())


def find_source(module: str) -> Path | None:
    """Return the file that ``import module`` would load; None if neither the working directory nor sys.path has it.

    Imports nothing and raises nothing. Does not find modules that only an import hook provides.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    importlib.invalidate_caches()
    search_path: Sequence[str] | None = ["", *sys.path]
    origin = None
    for part in parts:
        # One part at a time: the finder would look for the parent of a dotted name among the imported modules.
        spec = PathFinder.find_spec(part, search_path) if search_path is not None else None
        if spec is None:
            return None
        origin, search_path = spec.origin, spec.submodule_search_locations
    return Path(origin) if origin else None


def replace_file(path: Path, data: bytes | str, *, mode: int | None = None, aside: Path | None = None) -> None:
    """Create or replace a file, so that a reader sees the old content or the new, never a part. Durable.

    ``data`` (text as UTF-8) is written to ``aside``, flushed, and renamed to ``path``. No other process may use
    ``aside``, by default NAME.new. ``mode`` holds the new file's permissions; None: the default ones. Raises OSError
    naming ``path``; if the write failed, the old file is unchanged.
    """
    content = data.encode() if isinstance(data, str) else data
    aside = aside or path.with_name(f"{path.name}.new")
    try:
        # A process that died in this function may have left the file.
        aside.unlink(missing_ok=True)
        try:
            descriptor = os.open(aside, _NEW, 0o666 if mode is None else mode)
            try:
                write_all(descriptor, content)
                # ``open`` clears the bits of the umask in its mode.
                if mode is not None:
                    os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except OSError as error:
        # The error of a write does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_whole(descriptor: int, data: bytes | memoryview) -> None:
    """Append ``data`` through a descriptor that was opened to append. Raises OSError, after restoring the old size.

    Only one writer may use the file at a time. A buffered file object will not do: it keeps the data that a full disk
    refused, and writes them when the file is closed.
    """
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class KeptWrites:
    """Performs writes of records in order. Keeps a write that fails, and all later ones, until it succeeds.

    A write is a function that does all of its work or raises OSError. At most ``most_bytes`` are kept: beyond that the
    oldest records are dropped and counted as lost. Used by one thread at a time. A signal handler that interrupts this
    thread may add records too. If it interrupts a write, its record is written after that one, or with the next record.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[tuple[Callable[[], None], int, int]] = deque()
        """(write, bytes, records) for each write that is kept, oldest first."""
        self._bytes = 0
        """Bytes of the kept records."""
        self.records = 0
        """Records that are kept."""
        self.lost = 0
        """Records that were dropped because too many were kept."""
        self.error: OSError | None = None
        """Error of the last write; None if it succeeded."""
        self._is_busy = False
        """Whether the kept records are being written or dropped."""

    def add(self, write: Callable[[], None], size: int, records: int = 1) -> None:
        """Write ``records`` records of ``size`` bytes in all, after the kept ones: now, or in a later call."""
        self._kept.append((write, size, records))
        self._bytes += size
        self.records += records
        self.retry()

    def retry(self) -> None:
        """Try the kept writes again; ``error`` and ``records`` show the result."""
        self._without_reentry(self._write)

    def give_up(self) -> None:
        """Drop all kept writes, and count their records as lost."""
        self._without_reentry(self._drop)

    def _without_reentry(self, work: Callable[[], None]) -> None:
        """Call ``work``, unless this call interrupts such work: that one then handles the added records as well."""
        if not self._is_busy:
            self._is_busy = True
            try:
                work()
            finally:
                self._is_busy = False

    def _write(self) -> None:
        """Perform the kept writes until one fails. Then drop the oldest ones above the limit."""
        self.error = None
        while self._kept:
            write, _size, _records = self._kept[0]
            try:
                write()
            except OSError as error:
                self.error = error
                break
            self._remove_oldest()
        self._drop(self._most_bytes)

    def _drop(self, above_bytes: int = -1) -> None:
        """Drop the oldest records until at most ``above_bytes`` are kept; by default all. Counts them as lost."""
        while self._kept and self._bytes > above_bytes:
            self.lost += self._remove_oldest()

    def _remove_oldest(self) -> int:
        """Remove the oldest write. Returns its number of records."""
        _, size, records = self._kept.popleft()
        self._bytes -= size
        self.records -= records
        return records


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of the data; ``os.write`` may write a part. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(path: Path) -> None:
    """Flush a file, or a folder with the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> Digest:
    """Read a file and return its digest."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return Digest(size, hasher.hexdigest())


def difference(path: Path, written: Digest) -> str | None:
    """Compare a file with the digest of what was written. Returns the difference in words, or None. Raises OSError."""
    found = digest_file(path)
    if found == written:
        return None
    if found.bytes != written.bytes:
        return f"has {found.bytes} bytes instead of {written.bytes}"
    return "does not hold what was written (its checksum differs)"


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Context that holds the lock of the existing file ``path``: yields True, or False if another process holds it.

    Raises OSError.
    """
    lock = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def lock_is_free(path: Path) -> bool:
    """Whether it is certain that no process holds this lock. A lock whose file does not exist is free."""
    try:
        with try_lock(path) as is_free:
            return is_free
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def are_locks_shared(path: Path, mounts: str | None = None) -> bool:
    """Whether a lock that is free here is free on every host, by the mount options of the file system at ``path``.

    ``mounts`` is the text of /proc/self/mountinfo; by default it is read.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return False
    innermost, options = "", ""
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        place = mount.split()[4]
        # The innermost mount counts. If several are at one place, the last counts, because it covers the others.
        if path.absolute().is_relative_to(place) and len(place) >= len(innermost):
            innermost, options = place, f"{mount} {kind}"
    return not LOCAL_LOCKS.search(options)


def from_json(text: str | bytes) -> Any:
    """Decode a JSON text. Raises ValueError for invalid JSON, too many digits and too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises OSError, or ValueError naming the file."""
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found

"""Files that are written as a whole or not at all, that outlive a power cut, and that a checksum can be held against.

A file is durable once it and the folder that names it have been flushed; the functions say which of the two they do.
A lock is flock's, on a file that is there for nothing else: it goes with the process that holds it. Records that a full
disk refuses wait in memory (``KeptWrites``). ``find_source`` finds the file of a user's module without importing it.
Every fault of JSON from an unknown source is a ValueError.

Fails with OSError, as the operating system says it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

import msgspec
import xxhash

CHUNK_BYTES = 4 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Digest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file when it was written."""

    bytes: int
    xxh3_128: str
    """Checksum of all bytes, in hexadecimal."""


def write_file(path: Path, chunks: Iterable[bytes]) -> Digest:
    """Write a file that is not there yet and flush it. The folder is the caller's to flush."""
    descriptor = os.open(path, _NEW, 0o644)
    hasher, size = xxhash.xxh3_128(), 0
    try:
        for chunk in chunks:
            hasher.update(chunk)
            size += len(chunk)
            _write_all(descriptor, chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Digest(size, hasher.hexdigest())


def find_source(module: str) -> Path | None:
    """The file that an import of ``module`` loads; None if neither the working directory nor the path has one.

    Nothing is imported, and nothing is raised. Modules that only an import hook finds are not found.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    places, file = ["", *sys.path], ""
    for part in parts:
        if file and not _is_package(file):
            return None
        folders: list[str] = []
        file = ""
        for place in places:
            file = _module_file(os.path.join(place, part))
            if file:
                folders = [os.path.dirname(file)]
                break
            # Folders without __init__.py are parts of one namespace package, unless a later place has a module.
            if os.path.isdir(folder := os.path.join(place, part)):
                folders.append(folder)
        places = folders
    return Path(file).absolute() if file else None


def _module_file(stem: str) -> str:
    """The file of the package or module with this path, without its suffix; empty if no such file exists."""
    suffixes = [*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES]
    candidates = (f"{path}{suffix}" for path in (os.path.join(stem, "__init__"), stem) for suffix in suffixes)
    return next(filter(os.path.isfile, candidates), "")


def _is_package(file: str) -> bool:
    return os.path.basename(file).startswith("__init__.")


def replace_file(path: Path, data: bytes | str, *, mode: int | None = None, aside: Path | None = None) -> None:
    """Put ``data`` (text in UTF-8) in the place of a file, if there is one; a reader sees either the old or the new.

    Durable. ``mode`` are the rights of the new file, those of any new file if None; ``aside`` is the place where it is
    written first, which is taken to be nobody else's. Raises OSError naming ``path``; all is then as before.
    """
    content = data.encode() if isinstance(data, str) else data
    aside = aside or path.with_name(f"{path.name}.new")
    try:
        # A process that died here has left its file.
        aside.unlink(missing_ok=True)
        try:
            descriptor = os.open(aside, _NEW, 0o666 if mode is None else mode)
            try:
                _write_all(descriptor, content)
                # ``open`` takes the bits of the umask off its mode.
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
        # A write does not say which file it was.
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_whole(descriptor: int, data: bytes | memoryview) -> None:
    """Write ``data`` through a descriptor that was opened to append. Raises OSError; the file is then as before.

    To be used by one writer of the file at a time. Not through a buffer: that of a file keeps what a full disk refused,
    and writes it when the file is closed.
    """
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, data)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class KeptWrites:
    """Writes of records, in order. One that fails is kept in memory, with all that follow, until it succeeds.

    At most ``most_bytes`` are kept: beyond that the oldest records are lost, and counted. A write either does all of
    its work or raises OSError. To be used by one thread at a time. Code that interrupts this thread, such as a signal
    handler, may add records as well. One that comes during a write is written after it, or with the next record.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[tuple[Callable[[], None], int, int]] = deque()
        self._bytes = 0
        self.records = 0
        """Records that are kept."""
        self.lost = 0
        """Records that were dropped because too many were kept."""
        self.error: OSError | None = None
        """Reason that the last try failed; None if it did not."""
        self._is_busy = False
        """Whether the kept records are being written or dropped."""

    def add(self, write: Callable[[], None], size: int, records: int = 1) -> None:
        """Write ``records`` records of ``size`` bytes behind all that are kept, now or later."""
        self._kept.append((write, size, records))
        self._bytes += size
        self.records += records
        self.retry()

    def retry(self) -> None:
        """Write what is kept; ``error`` and ``records`` show the result."""
        self._alone(self._write)

    def give_up(self) -> None:
        """Count what is kept as lost."""
        self._alone(self._drop)

    def _alone(self, work: Callable[[], None]) -> None:
        """Do ``work`` unless this call interrupts such work, which then takes in what was added."""
        if not self._is_busy:
            self._is_busy = True
            try:
                work()
            finally:
                self._is_busy = False

    def _write(self) -> None:
        self.error = None
        while self._kept:
            try:
                self._kept[0][0]()
            except OSError as error:
                self.error = error
                break
            self._forget()
        self._drop(self._most_bytes)

    def _drop(self, above_bytes: int = -1) -> None:
        """Count the oldest records as lost until at most ``above_bytes`` are kept; all of them without a limit."""
        while self._kept and self._bytes > above_bytes:
            self.lost += self._forget()

    def _forget(self) -> int:
        _, size, records = self._kept.popleft()
        self._bytes -= size
        self.records -= records
        return records


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(path: Path) -> None:
    """Flush a file, or the names that a folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether nobody else holds this lock; then it is held for as long as the context lasts. Raises OSError."""
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
    """Whether nobody holds this lock, for sure; one that is not there is held by nobody."""
    try:
        with try_lock(path) as is_free:
            return is_free
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, too many digits and too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises OSError, and ValueError, which names the file."""
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found

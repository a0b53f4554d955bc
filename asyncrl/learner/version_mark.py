"""The version mark: the highest number that a publication of this run has ever had, and the learner's start number.

A version names one set of weights everywhere: in tickets, cache salts, engine labels, segments and bases of deltas.
So a number is made durable in the run's folder before anybody hears of it, and is never given again, whatever
dies between the two and whatever then starts in the same folder. A number that was marked and never published is
left out.

Fails with ConfigError naming the file when there is a mark that cannot be read, and with OSError when a number cannot
be made durable; it is not to be used then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from asyncrl.errors import ConfigError

FILE = "version_mark.json"
"""In the run's folder: ``{"version": ..., "start": ...}``."""


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    start: int = 0


class VersionMark:
    """The mark of one run. Reading and writing it blocks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        mark = self._read()
        self.version = mark.version
        """The highest number given so far; -1 before the first."""
        self.start = mark.start
        """How often a learner has begun in this folder."""

    def begin(self) -> int:
        """The number of this start of a learner, from 1, durable now. Raises OSError."""
        self._write(_Mark(self.version, self.start + 1))
        return self.start

    def advance(self) -> int:
        """A number that was never given before, durable now. Raises OSError."""
        self._write(_Mark(self.version + 1, self.start))
        return self.version

    def _write(self, mark: _Mark) -> None:
        aside = self._path.with_suffix(".new")
        try:
            with aside.open("wb") as file:
                file.write(msgspec.json.encode(mark))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            # A write does not say which file it was.
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.version, self.start = mark.version, mark.start

    def _read(self) -> _Mark:
        try:
            mark = msgspec.json.decode(self._path.read_bytes(), type=_Mark)
        except FileNotFoundError:
            return _Mark(-1)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError([f"{self._path}: {_UNREADABLE}: {error}"]) from error
        if mark.version < -1:
            raise ConfigError([f"{self._path}: {_UNREADABLE}: the version is {mark.version}"])
        return mark


_UNREADABLE = (
    "the version mark cannot be read, so that a number could be given twice; restore the file, or begin another run"
)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

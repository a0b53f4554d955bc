"""The version mark: the highest number that a publication of this run has ever had.

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
"""In the run's folder: ``{"version": ...}``."""


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int


class VersionMark:
    """The mark of one run. Reading and writing it blocks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.version = self._read()
        """The highest number given so far; -1 before the first."""

    def advance(self) -> int:
        """A number that was never given before, durable now. Raises OSError."""
        version = self.version + 1
        aside = self._path.with_suffix(".new")
        try:
            with aside.open("wb") as file:
                file.write(msgspec.json.encode(_Mark(version)))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path)
            _sync_folder(self._path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        self.version = version
        return version

    def _read(self) -> int:
        try:
            mark = msgspec.json.decode(self._path.read_bytes(), type=_Mark)
        except FileNotFoundError:
            return -1
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError([f"{self._path}: {_UNREADABLE}: {error}"]) from error
        if mark.version < 0:
            raise ConfigError([f"{self._path}: {_UNREADABLE}: the version is {mark.version}"])
        return mark.version


_UNREADABLE = (
    "the version mark cannot be read, so that a number could be given twice; restore the file, or begin another run"
)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

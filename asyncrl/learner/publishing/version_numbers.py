"""The numbers of versions and of the learner's starts: durable in the run's folder, and never given twice.

A version names one set of weights everywhere: in leases, cache salts, engine labels and segments. So a number is
durable before any other process hears of it. No number is given twice, not even if the learner dies in between or
starts again in the same folder. A number that was given and never published stays unused.

The highest numbers are in a file, the mark. It may get lost, come from a backup, or be damaged. So it is never trusted
alone: other durable files hold version numbers too (``find_used``), and new numbers are above all of them.

Fails with ConfigError naming the mark if it exists and cannot be read. Fails with OSError if a number cannot be made
durable; do not use the number then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.core.errors import ConfigError
from asyncrl.core.files import replace_file

FILE = "version_mark.json"
"""Name of the mark in the run's folder: ``{"version": ..., "start": ...}``."""
TAIL_BYTES = 4 << 20
"""Bytes of metrics.jsonl that are read from its end, where the highest numbers are."""


class Used(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest numbers given so far; the content of the mark. The defaults are those before any start."""

    version: int = -1
    start: int = 0


class VersionNumbers:
    """Gives the numbers of one run. Its methods block while they read and write the mark."""

    def __init__(self, folder: Path, used: Used | None = None) -> None:
        """``used`` are the highest numbers in other files of the run's folder; new numbers are above them."""
        self._path = folder / FILE
        used = used or Used()
        mark, self.problem = self._read(is_new_run=used == Used())
        """Problem with the mark, for the user; empty if it has none."""
        if not self.problem and (used.version > mark.version or used.start > mark.start):
            # The notice puts the file's name in front of the text.
            self.problem = f"is older than the run: it holds version {mark.version}"
        self.version = max(mark.version, used.version)
        """The highest number given so far; -1 before the first."""
        self.start = max(mark.start, used.start)
        """Number of the learner's starts in this folder."""

    def begin(self) -> int:
        """Count a start of the learner and return its number, from 1, which is durable now. Raises OSError."""
        self._write(Used(self.version, self.start + 1))
        return self.start

    def advance(self) -> int:
        """Give the next version number, which is durable now. Raises OSError."""
        self._write(Used(self.version + 1, self.start))
        return self.version

    def _write(self, mark: Used) -> None:
        replace_file(self._path, msgspec.json.encode(mark))
        self.version, self.start = mark.version, mark.start

    def _read(self, *, is_new_run: bool) -> tuple[Used, str]:
        """Read the mark, which only a new run may lack. Returns it, and its problem or "". Raises ConfigError."""
        try:
            mark = msgspec.json.decode(self._path.read_bytes(), type=Used)
        except FileNotFoundError:
            return Used(), "" if is_new_run else "is not there"
        except msgspec.DecodeError as error:
            return Used(), f"is damaged: {error}"
        except OSError as error:
            reason = f"cannot be read, so that a number could be given twice: {error.strerror or error}"
            raise ConfigError([f"{self._path}: {reason}; make it readable, or restore it"]) from error
        if mark.version < -1 or mark.start < 0:
            return Used(), f"is damaged: it holds version {mark.version}, start {mark.start}"
        return mark, ""


class _Line(msgspec.Struct, frozen=True):
    version: int | None = msgspec.field(default=None, name="weights/version")
    """The newest version; None in a line without one."""
    start: int = 0


def find_used(run_dir: Path, checkpoints: Path) -> Used:
    """Find the highest numbers in the names of checkpoints and in metrics.jsonl. Raises CheckpointError or OSError."""
    version, start = CheckpointFolder(checkpoints).highest_version(), 0
    for line in _last_lines(run_dir / "metrics.jsonl"):
        # Skip lines that cannot be read: the tail may begin inside a line, and a dead writer leaves the last one torn.
        with contextlib.suppress(msgspec.DecodeError):
            numbers = msgspec.json.decode(line, type=_Line)
            version, start = max(version, -1 if numbers.version is None else numbers.version), max(start, numbers.start)
    return Used(version, start)


def _last_lines(path: Path) -> list[bytes]:
    """The lines in the last TAIL_BYTES of a file; the first may lack its beginning. Empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []

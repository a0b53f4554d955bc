"""Answers of judges, kept in the run's folder by question, so that a resumed run asks nothing twice.

An entry is a file, written under another name and renamed. Invariant: an answer is found only for the same question,
and an unreadable or unwritable cache costs a question, never a run. Beyond ``most`` entries the oldest tenth is
deleted. Blocks; call it in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

import msgspec

from asyncrl.core.files import replace_file

MOST_ENTRIES = 100_000


class _Entry(msgspec.Struct, frozen=True):
    key: str
    text: str


class AnswerCache:
    """Answers in a folder of their own."""

    def __init__(self, folder: Path, *, most: int = MOST_ENTRIES) -> None:
        self._folder, self._most = folder, most
        self._lock = threading.Lock()
        self._count: int | None = None

    def find(self, key: str) -> str | None:
        """The answer, if it is kept."""
        try:
            entry = msgspec.json.decode((self._folder / key).read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return entry.text if entry.key == key else None

    def keep(self, key: str, text: str) -> bool:
        """Keep an answer; returns whether that went well."""
        with self._lock:
            try:
                if self._count is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._count = len(os.listdir(self._folder))
                if self._count >= self._most:
                    self._make_room()
                replace_file(self._folder / key, msgspec.json.encode(_Entry(key, text)))
                self._count += 1
            except OSError:
                return False
        return True

    def _make_room(self) -> None:
        with os.scandir(self._folder) as entries:
            written = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries)
        for _, path in written[: max(1, len(written) - self._most + self._most // 10)]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        # Counted again: other reward pools of the run keep answers there too.
        self._count = len(os.listdir(self._folder))


def key_of(*parts: object) -> str:
    """A name for a question: a hash of everything that determines the answer."""
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=20).hexdigest()

"""Reads the answers of judges, and keeps them in the run's folder, so that a resumed run does not ask for them again.

Reading finds the JSON in a text and matches its entries with the names in the question. Invariant: an answer is
accepted only if it has one entry for each name and no other entry. Otherwise BadAnswer lists the problems, in words
that help the judge to correct them.

AnswerCache keeps each answer in a file, which is written under another name and renamed. Invariant: an answer is found
only for the same question, and an unreadable or unwritable cache costs a question, never a run. When the cache is full,
the oldest tenth of its files is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from asyncrl.core.files import replace_file

T = TypeVar("T")

LONGEST_ANSWER = 200_000
"""Longest answer that is accepted (characters)."""
MOST_STARTS = 200
"""Largest number of places in an answer at which JSON is tried."""
MOST_PROBLEMS = 12
"""Most problems of an answer that are listed."""
MOST_ENTRIES = 100_000
"""Most files in a cache."""
REASONING_END = "</think>"
_OBJECT_START = re.compile(r'\{\s*"')


class BadAnswer(ValueError):
    """An answer that cannot be used; ``problems`` has a line for each problem."""

    def __init__(self, problems: list[str]) -> None:
        more = len(problems) - MOST_PROBLEMS
        self.problems = problems[:MOST_PROBLEMS] + [f"and {more} more"] * (more > 0)
        super().__init__("; ".join(self.problems))


class VoteFailed(Exception):
    """The judge gave no usable answer. ``kind`` is the cause in a few words; ``passing``: another attempt may
    succeed."""

    def __init__(self, kind: str, reason: str, *, passing: bool = True) -> None:
        self.kind, self.passing = kind, passing
        super().__init__(reason)


class JudgeMessage(msgspec.Struct):
    """Message of a chat completion."""

    content: str | None = None
    refusal: str | None = None


class JudgeChoice(msgspec.Struct):
    """Choice of a chat completion."""

    message: JudgeMessage
    finish_reason: str | None = None


class JudgeUsage(msgspec.Struct):
    """Tokens of a chat completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeCompletion(msgspec.Struct):
    """The fields of a chat completion that are used here."""

    choices: Annotated[list[JudgeChoice], Meta(min_length=1)]
    usage: JudgeUsage | None = None


def read_completion(body: bytes, url: str) -> JudgeCompletion:
    """Decode the body of an answer of the server at ``url``. Raises VoteFailed if it is no chat completion."""
    try:
        return msgspec.json.decode(body, type=JudgeCompletion)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VoteFailed("no chat completion", f"{url} gave no chat completion: {error}") from None


def read_entries(text: str, name: str) -> list[dict[str, Any]]:
    """Find the JSON object with the key ``name`` in ``text``, which may have prose around it; returns the objects in
    its list.

    Several such objects pass only if their lists are the same. Raises BadAnswer.
    """
    if not text.strip():
        raise BadAnswer(["the answer is empty"])
    if len(text) > LONGEST_ANSWER:
        raise BadAnswer([f"the answer has {len(text)} characters; {LONGEST_ANSWER} are allowed"])
    # Reasoning may hold drafts of the object, so the answer must end after the last mark of the end of reasoning. The
    # answer itself may quote that mark. So search from the last mark, then from the first, then from the beginning.
    first_mark, last_mark = text.find(REASONING_END), text.rfind(REASONING_END)
    objects: list[dict[str, Any]] = []
    for begin in sorted({0, max(0, first_mark), max(0, last_mark)}, reverse=True):
        objects = [each for each, end in _objects(text, begin) if end > last_mark and name in each]
        if objects:
            break
    if not objects:
        raise BadAnswer([f'there is no JSON object with the key "{name}" in the answer'])
    # Compare by repr, because 1 and true are equal.
    if any(repr(each[name]) != repr(objects[0][name]) for each in objects):
        raise BadAnswer([f'there are {len(objects)} different JSON objects with the key "{name}" in the answer'])
    entries = objects[0][name]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadAnswer([f'"{name}" is not a list of objects'])
    return entries


def read_entry_per_name(
    entries: Iterable[dict[str, Any]], key: str, wanted: Iterable[str], read: Callable[[dict[str, Any]], T]
) -> dict[str, T]:
    """Parse each entry with ``read``. Returns the results by the entries' ``key``, one for each name in ``wanted``.

    A missing, unknown or repeated name is a problem, and so is a ValueError of ``read``. Raises BadAnswer with all
    problems.
    """
    names = list(wanted)
    found: dict[str, T] = {}
    seen: set[str] = set()
    problems = []
    for entry in entries:
        name = entry.get(key)
        if not isinstance(name, str) or name not in names:
            problems.append(f"there is no {key} {_shown(name)}")
            continue
        if name in seen:
            problems.append(f'{key} "{name}" is there twice')
            continue
        seen.add(name)
        try:
            found[name] = read(entry)
        except ValueError as error:
            problems.append(f'{key} "{name}": {error}')
    problems += [f'{key} "{name}" is missing' for name in names if name not in seen]
    if problems:
        raise BadAnswer(problems)
    return {name: found[name] for name in names}


def read_number(value: Any, low: float, high: float) -> float:
    """Check that ``value`` is a number in [low, high], and return it. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the score {_shown(value)} is not a number")
    # Floats hold whole numbers below 2^53 exactly; a very large one cannot be made a float at all.
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 53) or not low <= value <= high:
        raise ValueError(f"the score {_shown(value)} is not between {low:g} and {high:g}")
    return float(value)


def _objects(text: str, begin: int) -> list[tuple[dict[str, Any], int]]:
    """Find the outermost JSON objects in ``text`` from ``begin`` on. Returns each with the index of its end.

    Tries at most MOST_STARTS places at which an object may begin.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_with_unique_keys)
    found, at = [], begin
    for _ in range(MOST_STARTS):
        start = _OBJECT_START.search(text, at)
        if start is None:
            break
        try:
            value, at = decoder.raw_decode(text, start.start())
            found.append((value, at))
        except (ValueError, RecursionError):
            at = start.start() + 1
    return found


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs. Raises ValueError if two keys are equal, since either could be meant."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _shown(value: Any) -> str:
    """Format a value of the judge's JSON for a problem, cut to 80 characters."""
    return json.dumps(value, default=str)[:80]


class _Entry(msgspec.Struct, frozen=True):
    key: str
    text: str


class AnswerCache:
    """Answers in a folder, about ``most`` at the most. The methods block, so call them in a thread."""

    def __init__(self, folder: Path, *, most: int = MOST_ENTRIES) -> None:
        self._folder, self._most = folder, most
        self._lock = threading.Lock()
        self._count: int | None = None
        """About the number of files in the folder; None before the first ``keep``."""

    def find(self, key: str) -> str | None:
        """Return the kept answer to the question ``key``; None without one."""
        try:
            entry = msgspec.json.decode((self._folder / key).read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return entry.text if entry.key == key else None

    def keep(self, key: str, text: str) -> bool:
        """Keep the answer to the question ``key``. Returns False if it cannot be written."""
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
        """Delete the oldest entries, so that a tenth of ``most`` is free, and count the other entries."""
        with os.scandir(self._folder) as entries:
            written = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries)
        for _, path in written[: max(1, len(written) - self._most + self._most // 10)]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        # Count the files again, because other reward pools of the run keep answers in the folder too.
        self._count = len(os.listdir(self._folder))


def key_of(*parts: object) -> str:
    """A name for a question: a hash of everything that determines the answer."""
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=20).hexdigest()

"""The steps of metrics.jsonl, found by their offsets.

The file of a long run is large, mostly lines of weight updates. ``StepIndex`` keeps the place of each train line, so a
page of steps reads only its own lines. ``refresh`` reads what was appended.

Invariant: the steps ascend, and each has one line: that of the newest start of the learner (metrics_line.is_voided).
A line that is torn or invalid is not a step. A file that was replaced or cut is read again. Without a file there is
no step; raises OSError if metrics.jsonl cannot be read. Several threads may use it.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from bisect import bisect_left
from pathlib import Path
from threading import Lock
from typing import Annotated, BinaryIO

import msgspec
import xxhash
from msgspec import Meta

from asyncrl.observe.metrics_line import LARGEST_WHOLE, Line, number_in, parse_line

METRICS = "metrics.jsonl"
MOST_LINE_BYTES = 1 << 20
MARK_BYTES = 4096
"""Bytes before the place up to which metrics.jsonl was read; the checksum over them recognises the file."""

Whole = Annotated[int, Meta(ge=-1, le=LARGEST_WHOLE)]


class Head(msgspec.Struct, frozen=True):
    """The part of a line that the index needs."""

    kind: str = ""
    step: Whole | None = None
    start: Whole = 0
    """Number of the learner's start."""


HEADS = msgspec.json.Decoder(Head)


class StepIndex:
    """The steps of the run in ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
        self._steps, self._offsets = array("q"), array("q")
        # Offset up to which the file was read, and the checksum before it (``_mark_of``).
        self._read = self._mark = 0
        # The newest start of the learner in the lines that were read.
        self._start = 0

    def refresh(self) -> None:
        """Read the lines that were appended. Without a file there is no step. Raises OSError."""
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # The file was cut, or replaced by another one.
            if size < self._read or self._mark != self._mark_of(file):
                self._forget()
            if size > self._read:
                self._read_on(file)

    def count(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def place(self, step: int) -> int:
        """Index at which ``step`` is, or would be: the number of steps before it."""
        with self._lock:
            return bisect_left(self._steps, step)

    def lines(self, first: int, end: int) -> list[Line]:
        """The train lines of the steps with indices ``first`` to before ``end``; indices below 0 have no line.

        Raises OSError.
        """
        with self._lock:
            offsets = self._offsets[max(first, 0) : max(end, 0)]
        if not offsets:
            return []
        lines = []
        with self._path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                if line := parse_line(file.readline(MOST_LINE_BYTES)):
                    lines.append(line)
        return lines

    def line(self, step: int) -> Line | None:
        """The train line of a step; None without one. Raises OSError."""
        at = self.place(step)
        found = self.lines(at, at + 1)
        return found[0] if found and found[0].get("step") == step else None

    def _read_on(self, file: BinaryIO) -> None:
        """Read the complete lines from ``_read`` on. A line above MOST_LINE_BYTES comes in parts, and is no step."""
        file.seek(self._read)
        offset = self._read
        while text := file.readline(MOST_LINE_BYTES):
            if not text.endswith(b"\n") and len(text) < MOST_LINE_BYTES:
                # The writer has not finished this line.
                break
            # Most lines are of updates, and need no parser.
            if b'"train"' in text and (head := _head(text)) and head.kind == "train" and head.step is not None:
                self._add(head.step, head.start, offset)
            offset += len(text)
        self._read = offset
        self._mark = self._mark_of(file)

    def _add(self, step: int, start: int, offset: int) -> None:
        """Add the place of a train line. The first one of a newer start removes its step and later ones."""
        if start > self._start:
            self._start = start
            at = bisect_left(self._steps, step)
            del self._steps[at:], self._offsets[at:]
        if self._steps and self._steps[-1] >= step:
            # A line that the learner wrote again after an error of the disk.
            at = bisect_left(self._steps, step)
            if self._steps[at] == step:
                self._offsets[at] = offset
            return
        self._steps.append(step)
        self._offsets.append(offset)

    def _mark_of(self, file: BinaryIO) -> int:
        """Checksum of the last MARK_BYTES of what was read."""
        begin = max(0, self._read - MARK_BYTES)
        file.seek(begin)
        return xxhash.xxh3_64_intdigest(file.read(self._read - begin)) if self._read else 0


def _head(text: bytes) -> Head | None:
    """Read the head of a line; None if that is invalid. Reading the whole line takes 30 times as long."""
    try:
        return HEADS.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # msgspec lacks the NaN of Python's JSON.
        line = parse_line(text)
        return None if line is None else msgspec.convert(line, Head)


def trained_version(line: Line) -> int | None:
    """The policy version that the step of a train line trained; None if unknown.

    ``weights/version`` of the line is the version after the step, which may have published one.
    """
    version, publish_s = line.get("weights/version"), number_in(line, "time/publish_s")
    if not isinstance(version, int) or version < 0 or publish_s is None:
        return None
    return version - (publish_s > 0)

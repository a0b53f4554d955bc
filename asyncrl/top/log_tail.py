"""The end of an actor's log file, or its end at an earlier moment.

Lines come in order of time, each with a timestamp in ISO 8601; what was printed without one belongs to the line before.
Invariant: a log of any length is read in a few small parts.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

LINES = 20
BYTES = 16_384
PROBE = 1 << 18
"""Bytes, at most, that are looked through for a line with a timestamp."""


def last_lines(run_dir: Path, attempt: int, actor: str, until: float | None = None) -> list[str] | None:
    """The last lines up to ``until`` (Unix time, s), oldest first; None if the file is missing or unreadable, for
    example on another host. A last line longer than ``BYTES`` loses its beginning."""
    path = run_dir / "logs" / f"attempt_{attempt}" / f"{actor.replace('/', '-')}.log"
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            if until is not None:
                end = _end_of(file, end, until)
            begin = max(0, end - BYTES)
            file.seek(begin)
            lines = file.read(end - begin).decode(errors="replace").splitlines()
    except OSError:
        return None
    # The first line of a part may be torn: it is shown only without others.
    return ((lines[1:] if begin else []) or lines)[-LINES:]


def _end_of(file: BinaryIO, size: int, until: float) -> int:
    """Offset of the first later line; ``size`` without one."""
    # The first line with a timestamp that begins at ``late`` or after it is later, and that of ``early`` is not.
    early, late = 0, size
    while late - early > BYTES:
        middle = (early + late) // 2
        found = _first_stamp(file, middle, PROBE)
        if found is None or found[1] > until:
            late = middle
        else:
            early = middle
    at = early
    while (found := _first_stamp(file, at, size - at)) is not None:
        begin, stamp, end = found
        if stamp > until:
            return begin
        at = end
    return size


def _first_stamp(file: BinaryIO, offset: int, most: int) -> tuple[int, float, int] | None:
    """Begin (offset), time and end (offset) of the first line with a timestamp that begins at ``offset`` or within
    ``most`` bytes after it."""
    file.seek(max(0, offset - 1))
    if offset:
        # The rest of the line before, which is nothing but its end where a line begins at ``offset``.
        file.readline(PROBE)
    while (begin := file.tell()) <= offset + most and (line := file.readline(PROBE)):
        if (stamp := _stamp(line)) is not None:
            return begin, stamp, file.tell()
    return None


def _stamp(line: bytes) -> float | None:
    try:
        return datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None

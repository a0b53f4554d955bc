"""The end of an actor's log file, or its end at an earlier moment.

Lines come in order of time, each with a timestamp in ISO 8601; what was printed without one belongs to the line before.
Invariant: a log of any length is read in a few small parts.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

LINES = 20
BYTES = 16_384


def last_lines(run_dir: Path, attempt: int, actor: str, until: float | None = None) -> list[str] | None:
    """The last lines up to ``until`` (Unix time, s), or of all, oldest first; None when there is no such file that can
    be read, as when it is on another host."""
    path = run_dir / "logs" / f"attempt_{attempt}" / f"{actor.replace('/', '-')}.log"
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            if until is not None:
                later = bisect_right(range(end), until, key=lambda offset: _stamp_from(file, offset)[0])
                end = _stamp_from(file, later)[1]
            begin = max(0, end - BYTES)
            file.seek(begin)
            lines = file.read(end - begin).decode(errors="replace").splitlines()
    except OSError:
        return None
    # The first of a part of a file may be torn.
    return (lines[1:] if begin else lines)[-LINES:]


def _stamp_from(file: BinaryIO, offset: int) -> tuple[float, int]:
    """Time and offset of the first line with a timestamp that begins at ``offset`` or later; infinite at the end."""
    file.seek(max(0, offset - 1))
    if offset:
        # The rest of the line before, which is nothing but its end where a line begins at ``offset``.
        file.readline()
    begin = file.tell()
    while line := file.readline():
        if (stamp := _stamp(line)) is not None:
            return stamp, begin
        begin = file.tell()
    return float("inf"), begin


def _stamp(line: bytes) -> float | None:
    try:
        return datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None

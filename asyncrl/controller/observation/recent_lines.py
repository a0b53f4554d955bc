"""The newest lines of metrics for readers that follow the run step by step, and the check of a line. Pure.

Lines are numbered from 1. A reader that falls too far behind misses the oldest lines, and never gets one twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

from asyncrl.messages.actors import NOTICE, READY, Notice
from asyncrl.telemetry.metrics_line import is_sound

LONGEST_LINE = 1 << 18
"""Most bytes of a line, in JSON."""
LINES_KEPT = 1000
LINES_IN_REPLY = 100


def is_proper(line: Mapping[str, Any]) -> bool:
    """Whether a line is one: as a run writes it, with a step if its kind is train, no longer than LONGEST_LINE."""
    if not is_sound(line) or line.get("kind") in (NOTICE, READY) or min(line.get("step", 0), line.get("start", 0)) < 0:
        return False
    if line.get("kind") == "train" and "step" not in line:
        return False
    try:
        return len(msgspec.json.encode(line)) <= LONGEST_LINE
    except (TypeError, ValueError):
        return False


class RecentLines:
    """The newest lines, by number."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self.last = 0
        """Number of the newest line."""

    def add(self, line: dict[str, Any]) -> None:
        """Take in a line; the oldest goes when there are too many."""
        self._lines.append(line)
        self.last += 1

    def add_notice(self, actor: str, incarnation: int, notice: Notice) -> None:
        """A notice to the user goes the way of the lines."""
        self.add({"kind": NOTICE, "actor": actor, "incarnation": incarnation, **msgspec.structs.asdict(notice)})

    def add_ready(self, actor: str) -> None:
        """An actor that was started again is ready."""
        self.add({"kind": READY, "actor": actor})

    def after(self, seen: int) -> tuple[list[dict[str, Any]], int]:
        """The next lines after number ``seen``, at most LINES_IN_REPLY, and the number of the last of them."""
        first = max(seen, self.last - len(self._lines))
        skipped = len(self._lines) - (self.last - first)
        lines = list(islice(self._lines, skipped, skipped + LINES_IN_REPLY))
        return lines, first + len(lines)

"""Reading metrics.jsonl, whoever wrote it and however that ended, and what its lines say."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from asyncrl.monitor.metrics_line import Line, Standing, parse_line

__all__ = ["Line", "is_voided", "number_in", "read_metrics"]


def number_in(line: Line, key: str) -> float | None:
    """A finite number in a line; None where there is none: JSON as Python writes it knows NaN and Infinity too."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_metrics(path: Path, kinds: Collection[str] | None = None, damaged: list[int] | None = None) -> list[Line]:
    """The lines of a metrics file that tell of the run as it stands; none if there is no such file.

    ``kinds`` are those wanted, all without it: updates are many in a large run. What a learner that was started again
    has voided is left out (is_voided), and so is what is no line of metrics: ``damaged`` is given the numbers of such
    lines, from 1 on; a torn last line is none.
    """
    if not path.exists():
        return []
    found = Standing()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line = parse_line(text)
            if line is not None:
                found.take(line, keep=kinds is None or line.get("kind") in kinds)
            elif damaged is not None and text.endswith(b"\n"):
                damaged.append(number)
    return found.lines()


def is_voided(line: Line, by: Line) -> bool:
    """Whether ``line``, of any kind, tells of what was undone, by the line ``by`` of a step.

    A learner that was started again goes on from its checkpoint: its first step voids what its predecessors told of the
    same step and later ones.
    """
    goes_back = by.get("kind") == "train" and by.get("start", 0) > line.get("start", 0)
    return bool(goes_back and line.get("step", 0) >= by.get("step", 0))

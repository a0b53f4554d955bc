"""Reading metrics.jsonl, whoever wrote it and however that ended, and what its lines say."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def number_in(line: Line, key: str) -> float | None:
    """A finite number in a line; None where there is none: JSON as Python writes it knows NaN and Infinity too."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_metrics(path: Path, kinds: Collection[str] | None = None) -> list[Line]:
    """The lines of a metrics file that tell of the run as it stands (is_voided); none if there is no such file.

    ``kinds`` are those wanted, all without it: updates are many in a large run. A torn last line is left out.
    """
    if not path.exists():
        return []
    found: list[Line] = []
    newest = 0
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not isinstance(line, dict):
                continue
            if line.get("kind") == "train" and line.get("start", 0) > newest:
                newest = line["start"]
                found = [other for other in found if not is_voided(other, line)]
            if kinds is None or line.get("kind") in kinds:
                found.append(line)
    return found


def is_voided(line: Line, by: Line) -> bool:
    """Whether ``line``, of any kind, tells of what was undone, by the line ``by`` of a step.

    A learner that was started again goes on from its checkpoint: its first step voids what its predecessors told of the
    same step and later ones.
    """
    goes_back = by.get("kind") == "train" and by.get("start", 0) > line.get("start", 0)
    return bool(goes_back and line.get("step", 0) >= by.get("step", 0))

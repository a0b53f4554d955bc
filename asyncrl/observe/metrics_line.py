"""Lines of metrics.jsonl: checking, reading, and the lines that a restarted learner voids.

``start`` of a line numbers the starts of the learner. Invariant of a valid line: ``step``, ``start`` and
``weights/version`` are whole numbers from -1 on, and ``kind`` is text. Each other value is a number that fits into a
float, true, false or null. A key without a slash, or a key of weights/, may also have text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.core.files import from_json

Line = Mapping[str, Any]
WHOLE = ("step", "start", "weights/version")
LARGEST_WHOLE = 1 << 53
HIGH_TRUNCATION = 0.5
"""Share of truncated responses from which on the user is warned (learner/groups/notices.py)."""
LARGEST = 10**300
"""Largest magnitude of a whole number; a float still holds it."""


def room_for(line: Line, room: int) -> int:
    """Number of waiting lines at which a queue of size ``room`` drops ``line``.

    Lines of weight updates, one per replica and step, may fill only half of the queue.
    """
    return room // 2 if line.get("kind") == "update" else room


def parse_line(text: bytes) -> Line | None:
    """Parses a line; None if it is not a valid one."""
    try:
        line = from_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and is_sound(line) else None


def is_sound(line: Line) -> bool:
    """Whether a line has the form that a run writes."""
    whole = (line[key] for key in WHOLE if key in line)
    return (
        isinstance(line.get("kind", ""), str)
        and all(type(value) is int and -1 <= value <= LARGEST_WHOLE for value in whole)
        and all(_is_value(key, value) for key, value in line.items())
    )


def _is_value(key: str, value: object) -> bool:
    # True and False are ints too.
    if isinstance(value, int):
        return abs(value) <= LARGEST
    if isinstance(value, str):
        # A key with a slash has text only in lines of weight updates.
        return "/" not in key or key.startswith("weights/")
    return value is None or isinstance(value, float)


def number_in(line: Line, key: str) -> float | None:
    """A finite number in a line, or None. Python's JSON also has NaN and Infinity."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def busy_s(line: Line) -> float | None:
    """Seconds of a step in which the learner trained or published weights; None if unknown."""
    train_s = number_in(line, "time/train_s")
    return None if train_s is None else train_s + (number_in(line, "time/publish_s") or 0.0)


def is_eval_mean(key: str) -> bool:
    """Whether this key is the mean reward of an evaluation."""
    # A component of the reward may be called "mean" too.
    return key.startswith("eval/") and key.endswith("/mean") and "/component/" not in key


def eval_names(line: Line) -> list[str]:
    """Names of the evaluations with a mean in a line, in order."""
    return sorted(key.removeprefix("eval/").removesuffix("/mean") for key in filter(is_eval_mean, line))


def numbers_after(line: Line, beginning: str) -> dict[str, float]:
    """The finite numbers of a line whose keys start with ``beginning``, by the rest of their keys."""
    numbers = {key.removeprefix(beginning): number_in(line, key) for key in line if key.startswith(beginning)}
    return {key: value for key, value in numbers.items() if value is not None}


def eval_numbers(line: Line, name: str) -> dict[str, float]:
    """The numbers of the evaluation ``name`` in an eval line, by the rest of their keys, such as pass_at/4 or mean."""
    return numbers_after(line, f"eval/{name}/")


def pass_at_numbers(numbers: Mapping[str, float]) -> dict[int, float]:
    """pass@k by k, in order of k, from the result of ``eval_numbers``."""
    members = numbers_after(numbers, "pass_at/")
    return {int(k): members[k] for k in sorted(filter(str.isdecimal, members), key=int)}


def component_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Means of the reward's components by name, from the result of ``eval_numbers``."""
    return numbers_after(numbers, "component/")


def served_versions(line: Line) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled the responses of an eval line; None if unknown.

    An eval line has one evaluation. The versions may be older than the line's step, because that is the step at which
    the round of evaluation was complete.
    """
    newest = line.get("weights/version")
    minima = (number_in(line, key) for key in line if key.startswith("eval/") and key.endswith("/version_min"))
    oldest = next(minima, None)
    if not isinstance(newest, int) or newest < 0 or oldest is None:
        return None
    return min(newest, int(oldest)), newest


def versions_in_words(line: Line) -> str:
    """``served_versions`` as text; empty if unknown."""
    served = served_versions(line)
    if served is None:
        return ""
    oldest, newest = served
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def without_first(train: Sequence[Line]) -> list[Line]:
    """Returns train lines without the first one after each start of the learner, and without the very first.

    The time of such a step includes waiting for engines and evaluations.
    """
    return [line for previous, line in pairwise(train) if line.get("start") == previous.get("start")]


def is_voided(line: Line, by: Line) -> bool:
    """Whether the train line ``by`` voids ``line``, of any kind.

    A restarted learner resumes from its checkpoint and trains some steps again. Its train line voids the lines of
    earlier starts that are of the same step or a later one.
    """
    goes_back = by.get("kind") == "train" and by.get("start", 0) > line.get("start", 0)
    return bool(goes_back and line.get("step", 0) >= by.get("step", 0))


def read_metrics(
    path: Path, kinds: Collection[str] | None = None, of_updates: Collection[str] | None = None
) -> list[Line]:
    """Read the valid lines of a metrics file, without voided lines (is_voided); empty if there is no file.

    ``kinds`` selects the kinds of lines; None selects all. ``of_updates`` saves memory, because a large run has many
    update lines: these keep only kind, step, start and the keys in ``of_updates``. None keeps all keys.
    """
    if not path.exists():
        return []
    lines: list[Line] = []
    newest_start = 0
    with path.open("rb") as file:
        for line in filter(None, map(parse_line, file)):
            kind, start = line.get("kind"), line.get("start", 0)
            # The first train line of a start has its lowest step, so later lines of this start void nothing more.
            if kind == "train" and start > newest_start:
                newest_start = start
                lines = [other for other in lines if not is_voided(other, line)]
            if kind == "update" and of_updates is not None:
                line = {key: line[key] for key in ("kind", "step", "start", *of_updates) if key in line}
            if kinds is None or kind in kinds:
                lines.append(line)
    return lines

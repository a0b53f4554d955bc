"""The lines of a run's logs that speak of one prompt group; see story.py.

Lines that are torn, or not what they should be, are left out. Where the clocks of hosts differ a little, effects are
put after their causes: no sample begins before its grant, no group is taken before its last score. Logs are read line
by line and never held.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.telemetry.group_log import GENERATED, GRANTED, RESTORED, TAKEN
from asyncrl.telemetry.snapshots.folder import entries_of
from asyncrl.telemetry.snapshots.snapshot_codec import is_wall

CLOCK_SLACK_S = 5.0
"""Most by which the clocks of two hosts are taken to differ."""

_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


@dataclass(slots=True)
class LogLine:
    """A line of an actor's log."""

    attempt: int
    """Attempt of the run: the number of the folder."""
    wall: float
    """Unix time (s)."""
    actor: str
    event: str
    facts: dict[str, Any]
    shift: float = 0.0
    """Seconds that are added to its times."""


def log_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Every log with the number of its attempt, in order."""
    return sorted(_log_files(run_dir))


def _log_files(run_dir: Path) -> Iterator[tuple[int, Path]]:
    for folder in entries_of(run_dir / "logs"):
        if match := _ATTEMPT.fullmatch(folder.name):
            yield from ((int(match[1]), path) for path in entries_of(folder) if path.suffix == ".log")


def lines_of(path: Path, attempt: int, uid: str) -> Iterator[LogLine]:
    """Lines that speak of the group, and the starts of a learner."""
    quoted, restored = f'"{uid}"'.encode(), f'"{RESTORED}"'.encode()
    with path.open("rb") as file:
        for data in file:
            if quoted in data or restored in data:
                line = parse(data, attempt)
                if line is not None and (
                    line.event == RESTORED or line.facts.get("uid") == uid or uid in line.facts.get("uids", ())
                ):
                    yield line


def parse(data: bytes, attempt: int) -> LogLine | None:
    """The line; None for text that is no such line."""
    try:
        facts = msgspec.json.decode(data, type=dict[str, Any])
        wall = datetime.fromisoformat(facts.pop("timestamp")).timestamp()
        actor, event = facts.pop("actor"), facts.pop("event")
        if not isinstance(facts.get("uids", []), list) or not isinstance(actor, str) or not isinstance(event, str):
            return None
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    if not is_wall(wall):
        return None
    return LogLine(attempt, wall, actor, event, facts)


def aligned(lines: list[LogLine]) -> list[LogLine]:
    """The lines, those of rollouters not before the grant, those of the learner not before the last token."""
    lines = list(_newest_words(lines))
    granted = {
        (line.attempt, _plain(line.facts.get("to")), number): line.wall
        for line in lines
        if line.event == GRANTED
        for number in _grant_numbers(line)
    }
    ends: dict[tuple[int, str], float] = {}
    for line in lines:
        if line.event == GENERATED:
            at = granted.get((line.attempt, line.actor, _plain(line.facts.get("grant"))))
            line.shift = _late(at, line.facts.get("since"))
            # The first, where it had the group more than once.
            end = _last_event(line) + line.shift
            ends[line.attempt, line.actor] = min(end, ends.get((line.attempt, line.actor), end))
    shifts: dict[tuple[int, str], float] = {}
    for line in lines:
        if line.event == TAKEN and isinstance(by := line.facts.get("by"), str):
            shift = _late(ends.get((line.attempt, by)), line.wall)
            shifts[line.attempt, line.actor] = max(shift, shifts.get((line.attempt, line.actor), 0.0))
    for line in lines:
        line.shift = max(line.shift, shifts.get((line.attempt, line.actor), line.shift))
    return lines


def _newest_words(lines: list[LogLine]) -> Iterator[LogLine]:
    """The lines, with only the newest word of a rollouter on each grant, which has it all."""
    newest = {_grant_of(line): line for line in sorted(lines, key=lambda line: line.wall) if line.event == GENERATED}
    yield from (line for line in lines if line.event != GENERATED or newest[_grant_of(line)] is line)


def _grant_of(line: LogLine) -> tuple[int, str, Any, Any]:
    return line.attempt, line.actor, _plain(line.facts.get("grant")), _plain(line.facts.get("since"))


def _plain(value: Any) -> int | float | str | None:
    """A number or a text; None for all else, which names no grant."""
    return value if isinstance(value, (int, float, str)) else None


def _late(cause: float | None, effect: Any) -> float:
    """Seconds by which an effect is to be put off."""
    if cause is None or not isinstance(effect, (int, float)):
        return 0.0
    return cause - effect if 0 < cause - effect < CLOCK_SLACK_S else 0.0


def _grant_numbers(line: LogLine) -> list[Any]:
    grants = line.facts.get("grants", [])
    if not isinstance(grants, list):
        return []
    return [_plain(grant[0]) for grant in grants if isinstance(grant, list) and grant]


def _last_event(line: LogLine) -> float:
    try:
        seconds = [event[0] for events in line.facts["samples"] for event in events]
        return float(line.facts["since"] + max(seconds, default=0.0))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return line.wall

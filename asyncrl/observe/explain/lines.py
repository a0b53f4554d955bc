"""Reads the log lines of one prompt group; see history.py.

Text that does not decode as such a line is skipped. If the clocks of hosts differ by less than CLOCK_SLACK_S, effects
are moved after their causes: a sample begins after its lease, and the learner takes a group after its last score. Logs
are read line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncrl.observe.group_log import GENERATED, LEASED, RESTORED, TAKEN
from asyncrl.observe.recording import entries_of

CLOCK_SLACK_S = 5.0
"""Largest difference between two clocks that is corrected (s)."""
_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


class LogLine(Struct, kw_only=True):
    """A line of an actor's log, with the fields of all events of group_log.py; ``words_of`` puts each into words.

    Other lines have only text fields.
    """

    actor: str
    event: str
    timestamp: datetime
    attempt: int = 0
    """Attempt of the run: the number of the folder."""
    shift: float = 0.0
    """Seconds to add to its times, so that effects come after causes."""
    uid: str = ""
    uids: list[str] = []
    to: str = ""
    leases: list[tuple[int, int, int, bool]] = []
    """For each of ``uids``: (number of the lease, newest version, deaths, whether the group is leased alone)."""
    lease: int = 0
    since: float = 0.0
    samples: list[list[list[Any]]] = []
    """For each sample its events: [seconds after ``since``, kind of event, facts ...]."""
    left_out: int = 0
    end: str = ""
    by: str = ""
    into: str = ""
    of: str = ""
    held: bool = False
    step: int = 0
    version: int | None = None
    outcome: str = "quarantined"
    reason: Any = ""
    error: Any = ""
    text: Any = ""

    def __post_init__(self) -> None:
        if not all(event and isinstance(event[0], int | float) for events in self.samples for event in events):
            raise ValueError("an event of a sample has no time")

    @property
    def wall(self) -> float:
        """Unix time (s)."""
        return self.timestamp.timestamp()

    @property
    def last_event(self) -> float:
        """Unix time (s) of the last event of its samples."""
        return self.since + max((event[0] for events in self.samples for event in events), default=0.0) + self.shift

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the lease that a rollouter's line is about."""
        return self.attempt, self.actor, self.lease, self.since


_decode = msgspec.json.Decoder(LogLine).decode


def log_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Every (number of the attempt, log file) of a run, in order."""
    files: list[tuple[int, Path]] = []
    for folder in entries_of(run_dir / "logs"):
        if match := _ATTEMPT.fullmatch(folder.name):
            files += [(int(match[1]), path) for path in entries_of(folder) if path.suffix == ".log"]
    return sorted(files)


def lines_of(path: Path, attempt: int, *words: str) -> Iterator[LogLine]:
    """Yields the lines of a log that contain one of ``words`` in quotation marks."""
    quoted = [f'"{word}"'.encode() for word in words]
    with path.open("rb") as file:
        for data in file:
            if any(word in data for word in quoted):
                try:
                    line = _decode(data)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                line.attempt, line.shift = attempt, 0.0
                yield line


def lines_on(run_dir: Path, uid: str) -> list[LogLine]:
    """Returns the lines on a group and those on starts of the learner, with corrected times (``aligned``)."""
    lines = [line for attempt, path in log_files(run_dir) for line in lines_of(path, attempt, uid, RESTORED)]
    return aligned([line for line in lines if line.event == RESTORED or uid in (line.uid, *line.uids)])


def aligned(lines: list[LogLine]) -> list[LogLine]:
    """Set ``shift`` (s) of the lines, which corrects the clocks of their hosts, and return them.

    A rollouter's line moves after its lease. The lines of a learner in an attempt move together, after the last sample
    event of the group. A rollouter's newest line on a lease repeats the events of the earlier ones, so only the newest
    is returned.
    """
    newest = {line.key: line for line in sorted(lines, key=lambda line: line.wall) if line.event == GENERATED}
    lines = [line for line in lines if line.event != GENERATED or newest[line.key] is line]
    leases = [line for line in lines if line.event == LEASED]
    leased_at = {(line.attempt, line.to, number): line.wall for line in leases for number, *_ in line.leases}
    ended_at: dict[tuple[int, str], float] = {}
    """Time of the last sample event, by attempt and rollouter."""
    for line in lines:
        if line.event == GENERATED:
            line.shift = _seconds_too_early(leased_at.get((line.attempt, line.actor, line.lease)), line.since)
            # If the rollouter had the group more than once, the earliest time counts.
            key = line.attempt, line.actor
            ended_at[key] = min(line.last_event, ended_at.get(key, line.last_event))
    shifts: dict[tuple[int, str], float] = {}
    """Shift of all lines of a learner, by attempt and actor."""
    for line in lines:
        if line.event == TAKEN:
            shift = _seconds_too_early(ended_at.get((line.attempt, line.by)), line.wall)
            shifts[line.attempt, line.actor] = max(shift, shifts.get((line.attempt, line.actor), 0.0))
    for line in lines:
        line.shift = max(line.shift, shifts.get((line.attempt, line.actor), line.shift))
    return lines


def _seconds_too_early(cause: float | None, effect: float) -> float:
    """Seconds by which an effect must move to come after its cause; 0 if it comes after, or from CLOCK_SLACK_S on."""
    return cause - effect if cause is not None and 0 < cause - effect < CLOCK_SLACK_S else 0.0

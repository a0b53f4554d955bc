"""The newest lines of metrics, events and open waits, for snapshots and for readers that follow the run. Pure.

Lines are numbered from 1. A reader that falls too far behind misses the oldest lines, and never gets one twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from asyncrl.messages.actors import NOTICE, READY, Notice
from asyncrl.messages.monitor import EVENTS, TRAIN_LINES, UPDATE_LINES, Event
from asyncrl.observe.metrics_line import is_sound, is_voided

LONGEST_LINE = 1 << 18
"""Most bytes of a line, in JSON."""
LINES_KEPT = 1000
LINES_IN_REPLY = 100
LONGEST_TEXT = 500
MOST_WAITS = 256
MOST_EVALS = 64
"""Most evaluations whose newest line is kept."""


def is_proper(line: Mapping[str, Any]) -> bool:
    """Whether a line is well-formed: as a run writes it, with a step if it is a train line, up to LONGEST_LINE.

    Rejects a line with a negative step, and the kinds that only the controller makes (notice, ready).
    """
    if not is_sound(line) or line.get("kind") in (NOTICE, READY) or min(line.get("step", 0), line.get("start", 0)) < 0:
        return False
    if line.get("kind") == "train" and "step" not in line:
        return False
    try:
        return len(msgspec.json.encode(line)) <= LONGEST_LINE
    except (TypeError, ValueError):
        return False


class RecentLines:
    """The newest LINES_KEPT lines, by number. Notices and reports of ready actors are lines too."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self.last = 0
        """Number of the newest line."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; drops the oldest one beyond LINES_KEPT."""
        self._lines.append(line)
        self.last += 1

    def add_notice(self, actor: str, incarnation: int, notice: Notice) -> None:
        """Add a notice to the user as a line."""
        self.add({"kind": NOTICE, "actor": actor, "incarnation": incarnation, **msgspec.structs.asdict(notice)})

    def add_ready(self, actor: str) -> None:
        """Add a line that an actor which was started again is ready."""
        self.add({"kind": READY, "actor": actor})

    def after(self, seen: int) -> tuple[list[dict[str, Any]], int]:
        """Return the next lines after number ``seen``, at most LINES_IN_REPLY, and the number of the last of them."""
        # Number of the line before the answer: above ``seen`` if the next lines of the reader are gone.
        passed = max(seen, self.last - len(self._lines))
        skipped = len(self._lines) - (self.last - passed)
        lines = list(islice(self._lines, skipped, skipped + LINES_IN_REPLY))
        return lines, passed + len(lines)


@dataclass(slots=True)
class RecentMetrics:
    """The newest lines of metrics.jsonl, by kind."""

    learner: int = -1
    """Incarnation of the learner that sent the newest train line; -1 if unknown."""
    train: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=TRAIN_LINES))
    updates: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=UPDATE_LINES))
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name of an evaluation: its newest line."""

    def add(self, line: dict[str, Any], by: int = -1) -> None:
        """Add a line from an actor of incarnation ``by``, or from the recording."""
        match line.get("kind"):
            case "train":
                self.learner = by
                self._void(line)
                self.train.append(line)
            case "update":
                self.updates.append(line)
            case "eval":
                # The keys are eval/NAME/..., with one NAME in a line.
                names = {key.split("/")[1] for key in line if key.startswith("eval/") and key.count("/") > 1}
                name = min(names, default="")
                if name in self.evals or len(self.evals) < MOST_EVALS:
                    self.evals[name] = line

    def _void(self, line: dict[str, Any]) -> None:
        """Remove lines of steps that the learner trains again after a restart, as ``line`` shows."""
        for lines in (self.train, self.updates):
            kept = [other for other in lines if not is_voided(other, line)]
            lines.clear()
            lines.extend(kept)
        self.evals = {name: other for name, other in self.evals.items() if not is_voided(other, line)}

    @property
    def all(self) -> tuple[Iterable[dict[str, Any]], ...]:
        """Lines by kind, the oldest first."""
        return self.train, self.updates, self.evals.values()

    @property
    def step(self) -> int:
        """Step of the newest line of training; 0 without one."""
        return int(self.train[-1].get("step", 0)) if self.train else 0


@dataclass(slots=True)
class RecentEvents:
    """The newest EVENTS events of a run."""

    kept: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    _number: int = 0
    """Number of the newest event."""
    _recalled: frozenset[tuple[str, float, str]] = frozenset()
    """Actor, time and text of the events of an earlier controller."""

    def add(self, wall: float, level: str, actor: str, text: str) -> None:
        """Add an event at ``wall`` (Unix, s)."""
        self._number += 1
        self.kept.append(Event(number=self._number, wall=wall, level=level, actor=actor, text=text[:LONGEST_TEXT]))

    def recall(self, earlier: Iterable[Event]) -> None:
        """Put the events of an earlier controller before the present ones, and number all of them again."""
        present = list(self.kept)
        self.kept.clear()
        for event in (*earlier, *present):
            self.add(event.wall, event.level, event.actor, event.text)
        self._recalled = frozenset((event.actor, event.wall, event.text) for event in earlier)

    def is_recalled(self, wall: float, actor: str, text: str) -> bool:
        """Whether an earlier controller had this event."""
        return (actor, wall, text[:LONGEST_TEXT]) in self._recalled


class OpenWaits:
    """The open waits of the run, in words such as "room on /runs", from the notices of actors; at most MOST_WAITS.

    A wait ends with the incarnation of its actor, or with a later notice of that actor and key. Each answer to a
    watcher of the run holds all waits, so a lost message cannot leave one on a screen. Beyond MOST_WAITS a notice is
    shown without its wait.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[int, str]] = {}
        """By actor and key of the notice: the actor's incarnation, and the words."""

    def take(self, actor: str, incarnation: int, key: str, waits_for: str) -> None:
        """End the earlier wait of this actor and key, and open a new one unless ``waits_for`` is empty.

        A notice of an older incarnation than that of the earlier wait changes nothing.
        """
        known_incarnation, _ = self._open.get((actor, key), (0, ""))
        if incarnation < known_incarnation:
            return
        self._open.pop((actor, key), None)
        if waits_for and len(self._open) < MOST_WAITS:
            self._open[actor, key] = incarnation, waits_for

    def words(self, lives: Callable[[str, int], bool]) -> list[str]:
        """The words of the open waits, each once, the oldest first.

        First ends the waits of incarnations for which ``lives`` (name, incarnation) is False.
        """
        self._open = {key: wait for key, wait in self._open.items() if lives(key[0], wait[0])}
        return list(dict.fromkeys(words for _, words in self._open.values()))

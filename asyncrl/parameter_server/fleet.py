"""All replicas and the questions that are parked here, and what the shell is to do about a change. Pure.

A caller has one question open at a time: whoever asks anew no longer waits for the answer to what it asked before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.parameter_server.replicas import FAILED_PHASES, WORDS, Event, Phase, Replica

STALE = 0
"""The number of a question whose asker has been replaced; it is never open."""
SILENT = float("-inf")
"""As the time when a replica was last heard: it will not be back soon."""
COUNTED = (
    "updates_committed",
    "updates_failed",
    "pauses_taken_back",
    "broadcasts_begun",
    "broadcasts_called_off",
    "broadcasts_broken",
)
"""What is counted from the start on."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log."""

    event: str
    facts: dict[str, Any]
    level: Literal["debug", "info", "warning"]


@dataclass(slots=True)
class Effects:
    """What has changed since the shell last looked."""

    wake: set[str] = field(default_factory=set)
    """Callers whose open question may have an answer now."""
    notes: list[Note] = field(default_factory=list)


class Fleet:
    """See the module."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.counts: Counter[str] = Counter()
        """See COUNTED."""
        self._effects = Effects()
        self._open: dict[str, int] = {}
        """Caller to the number of its open question."""
        self._last_question = STALE

    def take_effects(self) -> Effects:
        """What has changed since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    # --- questions ---

    def ask(self, name: str) -> int:
        """Open a question; returns its number. An earlier one of the same caller is closed."""
        self.wake(name)
        self._last_question += 1
        self._open[name] = self._last_question
        return self._last_question

    def asks(self, name: str, number: int | None = None) -> bool:
        """Whether this question (or any) of the caller is open."""
        found = self._open.get(name)
        return found is not None and number in (None, found)

    def close(self, name: str) -> None:
        """Its question is answered, or nobody waits for the answer any more."""
        self._open.pop(name, None)

    def wake(self, name: str) -> None:
        """The caller's question may have another answer now."""
        if name in self._open:
            self._effects.wake.add(name)

    # --- replicas ---

    def of(self, *phases: Phase) -> Iterator[Replica]:
        """Those in one of these phases."""
        return (replica for replica in self.replicas.values() if replica.phase in phases)

    def move(self, replica: Replica, event: Event) -> bool:
        """Let a replica go where the event leads; False if it leads nowhere."""
        before = replica.phase
        if not replica.follow(event):
            return False
        if event in (Event.COMMITTED, Event.FAILED, Event.OVERDUE):
            replica.seniority = 0
        if event is Event.COMMITTED:
            self.counts["updates_committed"] += 1
            replica.failed_attempts, replica.failed_version = 0, -1
        elif replica.phase in FAILED_PHASES and before not in FAILED_PHASES:
            self.counts["updates_failed"] += 1
        if event not in WORDS or before is Phase.REGROUPING:
            # Who does not regroup any more need not wait for the others.
            self.wake(replica.name)
        if replica.phase is not before:
            self.note("phase", level="debug", replica=replica.name, phase=str(replica.phase))
        return True

    def note(self, event: str, *, level: Literal["debug", "info", "warning"] = "info", **facts: Any) -> None:
        """Leave something for the log."""
        self._effects.notes.append(Note(event, facts, level))

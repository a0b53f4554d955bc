"""All replicas, the questions that are parked here, and the effects of a change for the shell. Pure.

A caller has one question open at a time: one that asks anew no longer waits for the answer to its earlier question.

Invariant: replicas are found by their phase, their host and whom they wait for without a look at the others, so that a
word of one of a thousand costs what it costs of ten; those of a phase come in the order in which they entered it.
Phases are changed by ``move``, hosts by ``settle_in`` and waits by ``await_other`` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from asyncrl.parameter_server.replicas import FAILED_PHASES, WORDS, Phase, Replica, ReplicaEvent

STALE = 0
"""The number of a question whose asker has been replaced; it is never open."""
SILENT = float("-inf")
"""Time at which a replica was last heard that will not be back soon."""
COUNTED = (
    "updates_committed",
    "updates_failed",
    "pauses_taken_back",
    "broadcasts_begun",
    "broadcasts_called_off",
    "broadcasts_broken",
)
"""Names of the counts that are kept from the start on."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    event: str
    facts: dict[str, Any]
    level: Literal["debug", "info", "warning"]


@dataclass(slots=True)
class Effects:
    """Changes since the shell last looked."""

    wake: set[str] = field(default_factory=set)
    """Callers whose open question may have an answer now."""
    notes: list[Note] = field(default_factory=list)


class Fleet:
    """The replicas and their open questions."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self._in_phase: dict[Phase, dict[str, Replica]] = {phase: {} for phase in Phase}
        self._on_host: dict[str, dict[str, Replica]] = {}
        self._waiting_for: dict[str, dict[str, Replica]] = {}
        """Waiting replicas, by the name of the replica that they wait for."""
        self._failing: dict[str, Replica] = {}
        """Replicas with failed attempts since their last commit."""
        self.counts: Counter[str] = Counter()
        """Counts from the start on, by the names in COUNTED."""
        self._effects = Effects()
        self._open: dict[str, tuple[int, int]] = {}
        """Number of each caller's open question, and the incarnation that asks it."""
        self._last_question = STALE

    def take_effects(self) -> Effects:
        """Changes since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    # --- questions ---

    def ask(self, name: str, incarnation: int) -> int:
        """Open a question; returns its number. An earlier one of the same caller is closed."""
        # The parked earlier question looks again, finds itself closed, and is answered with nothing.
        self.wake(name)
        self._last_question += 1
        self._open[name] = self._last_question, incarnation
        return self._last_question

    def asks(self, name: str, number: int | None = None) -> bool:
        """Whether this question (or any) of the caller is open."""
        found = self._open.get(name)
        return found is not None and number in (None, found[0])

    def close(self, name: str) -> None:
        """Close a caller's question: it is answered, or nobody waits for the answer any more."""
        self._open.pop(name, None)

    def close_of_dead(self, name: str, incarnation: int) -> None:
        """Close the question that this incarnation of a caller, or an older one, asks."""
        if name in self._open and self._open[name][1] <= incarnation:
            self.close(name)

    def wake(self, name: str) -> None:
        """Note that the caller's question may have another answer now."""
        if name in self._open:
            self._effects.wake.add(name)

    # --- replicas ---

    def add(self, replica: Replica) -> None:
        """Add a replica that was not known."""
        self.replicas[replica.name] = self._in_phase[replica.phase][replica.name] = replica
        self._on_host.setdefault(replica.host, {})[replica.name] = replica

    def remove(self, replica: Replica) -> None:
        """Remove a dead replica, also from its phase."""
        name = replica.name
        self.await_other(replica, "")
        del self.replicas[name], self._in_phase[replica.phase][name]
        self._failing.pop(name, None)
        self._leave_host(replica)
        # A dead member counts as one that failed, and is to blame for the end of its broadcast.
        replica.phase = Phase.BEHIND

    def settle_in(self, replica: Replica, host: str) -> None:
        """Note the host of a replica."""
        if host != replica.host:
            self._leave_host(replica)
            replica.host = host
            self._on_host.setdefault(host, {})[replica.name] = replica

    def _leave_host(self, replica: Replica) -> None:
        beside = self._on_host[replica.host]
        del beside[replica.name]
        if not beside:
            del self._on_host[replica.host]

    def await_other(self, replica: Replica, name: str) -> None:
        """Let a replica wait for the one of this name, which fetches; for nobody with an empty name."""
        if replica.waits_for:
            waiting = self._waiting_for[replica.waits_for]
            del waiting[replica.name]
            if not waiting:
                del self._waiting_for[replica.waits_for]
        replica.waits_for = name
        if name:
            self._waiting_for.setdefault(name, {})[replica.name] = replica

    def of(self, *phases: Phase) -> Iterator[Replica]:
        """Replicas in one of these phases."""
        return chain.from_iterable(self._in_phase[phase].values() for phase in phases)

    def count(self, phase: Phase) -> int:
        """Number of replicas in a phase."""
        return len(self._in_phase[phase])

    def first(self, phase: Phase) -> Replica | None:
        """The replica that has been in a phase for longest, or since ``begin_anew``."""
        return next(iter(self._in_phase[phase].values()), None)

    def begin_anew(self, replica: Replica) -> None:
        """Count a replica as if it had entered its phase now."""
        of_phase = self._in_phase[replica.phase]
        del of_phase[replica.name]
        of_phase[replica.name] = replica

    def beside(self, replica: Replica) -> Collection[Replica]:
        """Replicas of a replica's host, itself included."""
        return self._on_host[replica.host].values()

    def waits(self) -> Iterator[tuple[str, Mapping[str, Replica]]]:
        """Names of replicas that are waited for, each with those that wait."""
        return iter(self._waiting_for.items())

    @property
    def failed_attempts(self) -> int:
        """Largest number of failed attempts of any replica."""
        return max((replica.failed_attempts for replica in self._failing.values()), default=0)

    def move(self, replica: Replica, event: ReplicaEvent) -> bool:
        """Let a replica go where the event leads; False if it leads nowhere."""
        before = replica.phase
        if not replica.follow(event):
            return False
        if replica.phase is not before:
            del self._in_phase[before][replica.name]
            self._in_phase[replica.phase][replica.name] = replica
        if replica.failed_attempts:
            self._failing[replica.name] = replica
        # IDLE is not among them: a replica whose version made way for newer ones asks anew, and keeps its place.
        if event in (ReplicaEvent.COMMITTED, ReplicaEvent.FAILED, ReplicaEvent.OVERDUE):
            replica.seniority = 0
        if event is ReplicaEvent.COMMITTED:
            self.counts["updates_committed"] += 1
            replica.failed_attempts, replica.failed_version = 0, -1
            self._failing.pop(replica.name, None)
        elif replica.phase in FAILED_PHASES and before not in FAILED_PHASES:
            self.counts["updates_failed"] += 1
        if event not in WORDS or before is Phase.REGROUPING:
            # A replica that does not regroup any more need not wait for the others.
            self.wake(replica.name)
        if replica.phase is not before:
            self.note("phase", level="debug", replica=replica.name, phase=str(replica.phase))
        return True

    def note(self, event: str, *, level: Literal["debug", "info", "warning"] = "info", **facts: Any) -> None:
        """Leave something for the log."""
        self._effects.notes.append(Note(event, facts, level))

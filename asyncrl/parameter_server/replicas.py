"""Replicas as the parameter server knows them: phases, the table by which phases change, and parked questions. Pure.

A replica is the engine of one rollouter. Its events are its own messages and the parameter server's decisions. The
table has a next phase for each phase and possible event. A message that the table lacks for the present phase is late
or repeated, or was meant for an earlier parameter server, so it changes nothing. A decision that the table lacks is a
bug. docs/weights.md draws the table, and a test compares drawing and table.

A question is a call that is parked until it is answered. A caller has one open question at a time: a new question
closes the earlier one.

Invariant: replicas are found by phase and by host without a search. So the work for one message does not grow with the
number of replicas. The replicas of a phase are in the order in which they entered it. So phases are changed with
``move`` alone, and hosts with ``settle_in`` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, Literal

from asyncrl.messages import Request


class Phase(StrEnum):
    """Phase of a replica."""

    SERVING = "serving"
    """No update is under way; the replica serves a version, or none yet."""
    STAGING = "staging"
    """The replica fetches and verifies a version while it generates."""
    WAITING = "waiting"
    """The replica has staged the whole version, and waits for its turn to pause."""
    LOADING = "loading"
    """The pause is granted; the replica pauses, loads, and resumes."""
    BEHIND = "behind"
    """The last update failed. The replica takes part in no broadcast until an update ends in a commit."""
    ANNOUNCED = "announced"
    """The replica is a member of a broadcast, and has not paused for it yet."""
    BROADCAST_PAUSED = "paused"
    """The replica has paused for the broadcast, and waits for the other members."""
    RECEIVING = "receiving"
    """The broadcast has begun; the replica receives, verifies, loads, and resumes."""


class ReplicaEvent(StrEnum):
    """Events that move a replica from phase to phase."""

    IDLE = "idle"
    """NextUpdate: the replica has nothing staged and nothing paused."""
    ASKED = "asked"
    """RequestLoad, by shm or stream."""
    JOINED = "joined"
    """RequestLoad, for a broadcast."""
    COMMITTED = "committed"
    """ReportUpdate: the replica serves the version."""
    FAILED = "failed"
    """ReportUpdate: the replica could not update."""
    GAVE_UP = "gave_up"
    """The replica has cancelled its question, or ReportSleep: its update ends without a failure."""
    OFFERED = "offered"
    """A version was offered to the replica by shm or stream."""
    GRANTED = "granted"
    """The replica was allowed to pause."""
    INVITED = "invited"
    """The replica was made a member of a broadcast."""
    BEGUN = "begun"
    """The broadcast has begun: all members are paused."""
    CALLED_OFF = "called_off"
    """The broadcast was cancelled before it began."""
    BROKEN = "broken"
    """The broadcast failed after it had begun."""
    OVERDUE = "overdue"
    """The replica did not join the broadcast in time, or staged or held its pause for too long."""


MESSAGES = frozenset(
    {
        ReplicaEvent.IDLE,
        ReplicaEvent.ASKED,
        ReplicaEvent.JOINED,
        ReplicaEvent.COMMITTED,
        ReplicaEvent.FAILED,
        ReplicaEvent.GAVE_UP,
    }
)
"""Events that are a replica's own messages."""

_P, _E = Phase, ReplicaEvent
TRANSITIONS: dict[tuple[Phase, ReplicaEvent], Phase] = {
    (_P.SERVING, _E.IDLE): _P.SERVING,
    (_P.SERVING, _E.OFFERED): _P.STAGING,
    (_P.SERVING, _E.INVITED): _P.ANNOUNCED,
    # The update began under an earlier parameter server.
    (_P.SERVING, _E.ASKED): _P.WAITING,
    (_P.SERVING, _E.COMMITTED): _P.SERVING,
    (_P.SERVING, _E.FAILED): _P.BEHIND,
    (_P.SERVING, _E.GAVE_UP): _P.SERVING,
    # --- by shm or stream ---
    (_P.STAGING, _E.IDLE): _P.BEHIND,
    (_P.STAGING, _E.ASKED): _P.WAITING,
    (_P.STAGING, _E.FAILED): _P.BEHIND,
    (_P.STAGING, _E.OVERDUE): _P.BEHIND,
    (_P.STAGING, _E.GAVE_UP): _P.SERVING,
    (_P.WAITING, _E.IDLE): _P.BEHIND,
    (_P.WAITING, _E.ASKED): _P.WAITING,
    (_P.WAITING, _E.GRANTED): _P.LOADING,
    (_P.WAITING, _E.FAILED): _P.BEHIND,
    (_P.WAITING, _E.GAVE_UP): _P.SERVING,
    (_P.LOADING, _E.IDLE): _P.BEHIND,
    (_P.LOADING, _E.ASKED): _P.LOADING,
    (_P.LOADING, _E.COMMITTED): _P.SERVING,
    (_P.LOADING, _E.FAILED): _P.BEHIND,
    (_P.LOADING, _E.OVERDUE): _P.BEHIND,
    (_P.LOADING, _E.GAVE_UP): _P.SERVING,
    (_P.BEHIND, _E.IDLE): _P.BEHIND,
    (_P.BEHIND, _E.OFFERED): _P.STAGING,
    # The replica continued an update that was given up here.
    (_P.BEHIND, _E.ASKED): _P.WAITING,
    (_P.BEHIND, _E.COMMITTED): _P.SERVING,
    (_P.BEHIND, _E.FAILED): _P.BEHIND,
    # The failed attempts still count, because nothing was committed.
    (_P.BEHIND, _E.GAVE_UP): _P.BEHIND,
    # --- by broadcast ---
    (_P.ANNOUNCED, _E.IDLE): _P.ANNOUNCED,
    (_P.ANNOUNCED, _E.JOINED): _P.BROADCAST_PAUSED,
    (_P.ANNOUNCED, _E.FAILED): _P.BEHIND,
    (_P.ANNOUNCED, _E.OVERDUE): _P.BEHIND,
    (_P.ANNOUNCED, _E.CALLED_OFF): _P.SERVING,
    (_P.ANNOUNCED, _E.GAVE_UP): _P.SERVING,
    (_P.BROADCAST_PAUSED, _E.IDLE): _P.BEHIND,
    (_P.BROADCAST_PAUSED, _E.JOINED): _P.BROADCAST_PAUSED,
    (_P.BROADCAST_PAUSED, _E.FAILED): _P.BEHIND,
    (_P.BROADCAST_PAUSED, _E.BEGUN): _P.RECEIVING,
    (_P.BROADCAST_PAUSED, _E.CALLED_OFF): _P.SERVING,
    (_P.BROADCAST_PAUSED, _E.GAVE_UP): _P.SERVING,
    (_P.RECEIVING, _E.IDLE): _P.BEHIND,
    (_P.RECEIVING, _E.JOINED): _P.RECEIVING,
    (_P.RECEIVING, _E.COMMITTED): _P.SERVING,
    (_P.RECEIVING, _E.FAILED): _P.BEHIND,
    (_P.RECEIVING, _E.BROKEN): _P.BEHIND,
    (_P.RECEIVING, _E.GAVE_UP): _P.SERVING,
}

IDLE_PHASES = frozenset({Phase.SERVING, Phase.BEHIND})
"""Phases in which no update is under way."""
HOLDING_PHASES = frozenset({Phase.WAITING, Phase.LOADING})
"""Phases in which a replica has a whole version and loads it next."""
BROADCAST_PHASES = frozenset({Phase.ANNOUNCED, Phase.BROADCAST_PAUSED, Phase.RECEIVING})
"""Phases of the members of a broadcast."""


@dataclass(slots=True)
class Replica:
    """One rollouter's engine. Times are in seconds, on the parameter server's clock."""

    name: str
    incarnation: int
    serving: int = -1
    """Version that the replica serves, by its last message; it may be above any version known here."""
    engine: int = 0
    """Number of times that the replica got a new engine; a new engine is in no process group yet."""
    workers: int = 1
    """Processes of the engine that take part in a broadcast."""
    joins_nccl: bool = False
    """Whether the engine can be in an NCCL group."""
    same_host: bool = False
    """Whether the replica can open the segments that are held here."""
    host: str = ""
    """Host of the replica; empty if unknown. A replica can open the segments of the others on its host."""
    phase: Phase = Phase.SERVING
    target: int = -1
    """The version of the update under way; -1 in an idle phase."""
    fetches: bool = False
    """Whether the replica stages its target for its whole host (hosts.py)."""
    version_held_for_host: int = -1
    """Version that the replica has fetched and holds for its host; -1 for none."""
    held_paths: tuple[str, ...] = ()
    """Paths of the segments of the version held for the host."""
    waits_for: str = ""
    """Name of the replica on the same host that fetches the version that this one takes next."""
    source_paths: tuple[str, ...] = ()
    """Paths of the segments of another replica on its host that it was offered."""
    since: float = 0.0
    """Time at which the version was offered (STAGING), or the pause was granted or requested again (LOADING)."""
    seniority: int = 0
    """Rank among the replicas that try to reach a newer version: lower if it began to try earlier; 0 if it does not."""
    outrun: bool = False
    """Whether the parameter server has let go the version that the replica stages, for newer ones (conductor.py)."""
    heard: float = 0.0
    """Time of its last message, or of the last answer to it; SILENT if it sleeps or has cancelled its question."""
    failed_version: int = -1
    """Target of the last failed update."""
    failed_attempts: int = 0
    """Failed updates to ``failed_version`` in a row, without a commit since."""

    @property
    def is_fetching(self) -> bool:
        """Whether the replica fetches a version for its host now."""
        return self.phase is Phase.STAGING and self.fetches

    def follow(self, event: ReplicaEvent) -> bool:
        """Change to the phase that the table gives for ``event``; a change to BEHIND counts as a failed attempt.

        In an idle phase the replica has no target. Returns False for a message that the table does not have for the
        present phase: nothing changes.
        """
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            assert event in MESSAGES, f"{self.name} is {self.phase}: {event}"
            return False
        if phase is Phase.BEHIND and self.phase is not Phase.BEHIND:
            self.failed_attempts = self.failed_attempts + 1 if self.target == self.failed_version else 1
            self.failed_version = self.target
        self.phase = phase
        if phase in IDLE_PHASES:
            self.target = -1
        return True


SILENT = float("-inf")
"""Value of ``Replica.heard`` for a replica that sleeps or has cancelled its question: it does not count as present."""
COUNTED = (
    "updates_committed",
    "updates_failed",
    "pauses_taken_back",
    "broadcasts_begun",
    "broadcasts_called_off",
    "broadcasts_broken",
)
"""Names of the counts since the start."""
Level = Literal["debug", "info", "warning"]


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    event: str
    facts: dict[str, Any]
    level: Level


@dataclass(frozen=True, slots=True, eq=False)
class ParkedRequest:
    """A caller's request that is parked until it is answered."""

    name: str
    incarnation: int
    request: Request


class Replicas:
    """Holds all replicas by name, phase and host, and the open questions of all callers."""

    def __init__(self) -> None:
        self.by_name: dict[str, Replica] = {}
        self._in_phase: dict[Phase, dict[str, Replica]] = {phase: {} for phase in Phase}
        """Replicas of each phase by name, in the order in which they entered it."""
        self._on_host: dict[str, dict[str, Replica]] = {}
        """Replicas of each host by name."""
        self._failing: dict[str, Replica] = {}
        """Replicas with failed attempts since their last commit."""
        self.counts: Counter[str] = Counter()
        """Counts since the start, by the names in COUNTED."""
        self._woken: set[str] = set()
        """Callers whose open question may have an answer now."""
        self._notes: list[Note] = []
        """Log lines that the actor has not written yet."""
        self._open: dict[str, ParkedRequest] = {}
        """Open question of each caller."""

    def take_effects(self) -> tuple[set[str], list[Note]]:
        """Return what has come up since the last call: callers whose question may have an answer, and log lines."""
        woken, notes = self._woken, self._notes
        self._woken, self._notes = set(), []
        return woken, notes

    def note(self, event: str, *, level: Level = "info", **facts: Any) -> None:
        """Add a line for the log; the actor writes it."""
        self._notes.append(Note(event, facts, level))

    # --- questions ---

    def open(self, question: ParkedRequest) -> None:
        """Open a question. An earlier one of the same caller is closed."""
        # The parked earlier question is woken, finds itself closed, and gets an empty reply.
        self.wake(question.name)
        self._open[question.name] = question

    def is_open(self, question: ParkedRequest) -> bool:
        """Whether this question waits for its answer."""
        return self._open.get(question.name) is question

    def asks(self, name: str) -> bool:
        """Whether the caller has an open question."""
        return name in self._open

    def close(self, name: str) -> None:
        """Close a caller's question: it is answered or cancelled."""
        self._open.pop(name, None)

    def close_of_dead(self, name: str, incarnation: int) -> None:
        """Close a caller's question if this incarnation, or an older one, has asked it."""
        if name in self._open and self._open[name].incarnation <= incarnation:
            self.close(name)

    def wake(self, name: str) -> None:
        """Record that the caller's open question, if any, may have an answer now."""
        if name in self._open:
            self._woken.add(name)

    # --- replicas ---

    def add(self, replica: Replica) -> None:
        """Add a new replica."""
        self.by_name[replica.name] = self._in_phase[replica.phase][replica.name] = replica
        self._on_host.setdefault(replica.host, {})[replica.name] = replica

    def remove(self, replica: Replica) -> None:
        """Remove a dead replica, also from its phase."""
        name = replica.name
        del self.by_name[name], self._in_phase[replica.phase][name]
        self._failing.pop(name, None)
        self._wake_beside(replica)
        self._leave_host(replica)

    def settle_in(self, replica: Replica, host: str) -> None:
        """Record the host of a replica, which may have changed."""
        if host != replica.host:
            self._leave_host(replica)
            replica.host = host
            self._on_host.setdefault(host, {})[replica.name] = replica

    def _leave_host(self, replica: Replica) -> None:
        beside = self._on_host[replica.host]
        del beside[replica.name]
        if not beside:
            del self._on_host[replica.host]

    def _wake_beside(self, replica: Replica) -> None:
        """Wake the replicas of the same host that wait for this one to fetch: it has stopped fetching."""
        for other in self.beside(replica):
            if other.waits_for == replica.name and other.phase in IDLE_PHASES:
                self.wake(other.name)

    def of(self, *phases: Phase) -> Iterator[Replica]:
        """Replicas in one of these phases."""
        return chain.from_iterable(self._in_phase[phase].values() for phase in phases)

    def count(self, phase: Phase) -> int:
        """Number of replicas in a phase."""
        return len(self._in_phase[phase])

    def first(self, phase: Phase) -> Replica | None:
        """Return the replica that has been in a phase for longest; ``restart_phase`` counts as entering it."""
        return next(iter(self._in_phase[phase].values()), None)

    def restart_phase(self, replica: Replica) -> None:
        """Move a replica to the end of its phase, as if it had entered the phase now."""
        of_phase = self._in_phase[replica.phase]
        del of_phase[replica.name]
        of_phase[replica.name] = replica

    def beside(self, replica: Replica) -> Collection[Replica]:
        """Return the replicas on the same host, itself included."""
        return self._on_host[replica.host].values()

    def pinning(self) -> list[Replica]:
        """Return the replicas whose target the parameter server must keep for them.

        It must while a replica stages its target, or has fetched it and others of its host wait to open it. An outrun
        replica (conductor.py) pins nothing.
        """
        return [replica for replica in self.of(Phase.STAGING, *HOLDING_PHASES) if self._pins(replica)]

    def _pins(self, replica: Replica) -> bool:
        if replica.outrun:
            return False
        waiting = (each for each in self.beside(replica) if each.waits_for == replica.name)
        is_awaited = replica.fetches and any(each.phase in IDLE_PHASES for each in waiting)
        return replica.phase is Phase.STAGING or is_awaited

    @property
    def failed_attempts(self) -> int:
        """Largest number of failed attempts of any replica."""
        return max((replica.failed_attempts for replica in self._failing.values()), default=0)

    def move(self, replica: Replica, event: ReplicaEvent) -> bool:
        """Apply an event to a replica: change its phase, the lists and counts, and wake callers that this concerns.

        A decision wakes the replica; the end of a fetch wakes the replicas that wait for it. Returns False, and changes
        nothing, if the table does not have the event for the present phase.
        """
        phase_before, was_fetching = replica.phase, replica.is_fetching
        if not replica.follow(event):
            return False
        if was_fetching and not replica.is_fetching:
            self._wake_beside(replica)
        if replica.phase is not phase_before:
            del self._in_phase[phase_before][replica.name]
            self._in_phase[replica.phase][replica.name] = replica
            self.note("phase", level="debug", replica=replica.name, phase=str(replica.phase))
        if replica.failed_attempts:
            self._failing[replica.name] = replica
        # The try to reach a newer version has ended. IDLE does not end it: an outrun replica asks for the next update,
        # and keeps its seniority.
        if event in (ReplicaEvent.COMMITTED, ReplicaEvent.FAILED, ReplicaEvent.OVERDUE, ReplicaEvent.GAVE_UP):
            replica.seniority = 0
        if event is ReplicaEvent.COMMITTED:
            self.counts["updates_committed"] += 1
            replica.failed_attempts, replica.failed_version = 0, -1
            self._failing.pop(replica.name, None)
        elif replica.phase is Phase.BEHIND and phase_before is not Phase.BEHIND:
            self.counts["updates_failed"] += 1
        if event not in MESSAGES:
            self.wake(replica.name)
        return True

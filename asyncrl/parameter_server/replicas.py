"""Replicas as the parameter server knows them: phases, the table by which phases change, and parked questions. Pure.

A replica is the engine of one rollouter. Its events are its own messages and the parameter server's decisions. A
message that the table lacks for the present phase is late or repeated, or was meant for an earlier parameter server, so
it changes nothing. A decision that the table lacks is a bug. docs/weights.md draws the table, and a test compares them.

A question is a call that is parked until it is answered. A caller has one open question at a time: a new question
closes the earlier one.

Invariant: replicas are found by phase and by host without a search. The replicas of a phase are in the order in which
they entered it. So phases are changed with ``move`` alone, and hosts with ``settle_in`` alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from asyncrl.messages import Request
from asyncrl.messages.weights import Manifest


class Phase(StrEnum):
    """Phase of a replica."""

    SERVING = "serving"
    """No update is under way; the replica serves a version, or none yet."""
    STAGING = "staging"
    """The replica fetches and verifies a version while it generates."""
    WAITING = "waiting"
    """The replica has staged the whole version, and waits for its turn to pause."""
    LOADING = "loading"
    """The replica may load: it pauses, loads, and resumes."""
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
    """The replica serves the version, by ReportUpdate or NextUpdate."""
    FAILED = "failed"
    """The update has failed: by ReportUpdate, by a deadline, by another engine, or with its broadcast."""
    ENDED = "ended"
    """The update ends without a failure: its question is cancelled, or it sleeps, or a broadcast is called off."""
    ASSIGNED = "assigned"
    """A version was assigned to the replica by shm or stream."""
    INVITED = "invited"
    """The replica was made a member of a broadcast."""
    ADMITTED = "admitted"
    """The replica may load: its turn has come, or its broadcast has begun."""


_P, _E = Phase, ReplicaEvent
MESSAGES = frozenset({_E.IDLE, _E.ASKED, _E.JOINED, _E.COMMITTED, _E.FAILED, _E.ENDED})
"""Events that may come at any time, as messages of the replica."""
TRANSITIONS: dict[tuple[Phase, ReplicaEvent], Phase] = {
    # An update may end so in every phase. Exceptions follow.
    **{(phase, _E.IDLE): _P.BEHIND for phase in Phase},
    **{(phase, _E.FAILED): _P.BEHIND for phase in Phase},
    **{(phase, _E.ENDED): _P.SERVING for phase in Phase},
    (_P.SERVING, _E.IDLE): _P.SERVING,
    (_P.ANNOUNCED, _E.IDLE): _P.ANNOUNCED,
    # The failed attempts still count, because nothing was committed.
    (_P.BEHIND, _E.ENDED): _P.BEHIND,
    # --- by shm or stream ---
    (_P.SERVING, _E.ASSIGNED): _P.STAGING,
    (_P.BEHIND, _E.ASSIGNED): _P.STAGING,
    (_P.STAGING, _E.ASKED): _P.WAITING,
    (_P.WAITING, _E.ASKED): _P.WAITING,
    (_P.WAITING, _E.ADMITTED): _P.LOADING,
    (_P.LOADING, _E.ASKED): _P.LOADING,
    (_P.LOADING, _E.COMMITTED): _P.SERVING,
    # The update began under an earlier parameter server, or has failed here.
    (_P.SERVING, _E.ASKED): _P.WAITING,
    (_P.BEHIND, _E.ASKED): _P.WAITING,
    (_P.SERVING, _E.COMMITTED): _P.SERVING,
    (_P.BEHIND, _E.COMMITTED): _P.SERVING,
    # --- by broadcast ---
    (_P.SERVING, _E.INVITED): _P.ANNOUNCED,
    (_P.ANNOUNCED, _E.JOINED): _P.BROADCAST_PAUSED,
    (_P.BROADCAST_PAUSED, _E.ADMITTED): _P.RECEIVING,
    (_P.RECEIVING, _E.COMMITTED): _P.SERVING,
}

IDLE_PHASES = frozenset({Phase.SERVING, Phase.BEHIND})
"""Phases in which no update is under way."""
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
    """Whether the replica stages its target for its whole host."""
    assigned: Manifest | None = None
    """Manifest of the version that it stages from the parameter server; None if it opens a copy on its host."""
    pins: bool = False
    """Whether the parameter server keeps the version while this replica stages it."""
    copy: Manifest | None = None
    """Version that the replica has fetched and holds for its host, with the paths of its own segments."""
    waits: bool = False
    """Whether it has found, in this idle phase, another replica of its host fetching the version that it takes next."""
    since: float = 0.0
    """Time at which the version was assigned (STAGING), or the replica was admitted or asked again (LOADING)."""
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

    def serve(self, version: int) -> None:
        """Record the version that the replica serves; it has closed an older copy."""
        self.serving = version
        if self.copy is not None and self.copy.version < version:
            self.copy = None

    def follow(self, event: ReplicaEvent) -> bool:
        """Change to the phase that the table gives for ``event``; a change to BEHIND counts as a failed attempt.

        Returns False for a message that the table does not have for the present phase: nothing changes.
        """
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            assert event in MESSAGES, f"{self.name} is {self.phase}: {event}"
            return False
        if phase is Phase.BEHIND and self.phase is not Phase.BEHIND:
            self.failed_attempts = self.failed_attempts + 1 if self.target == self.failed_version else 1
            self.failed_version = self.target
        if phase is not self.phase:
            self.waits = False
        self.phase = phase
        if phase in IDLE_PHASES:
            self.target = -1
        return True


SILENT = float("-inf")
"""Value of ``Replica.heard`` for a replica that does not count as present."""
COUNTED = (
    "updates_committed",
    "updates_failed",
    "pauses_taken_back",
    "broadcasts_begun",
    "broadcasts_called_off",
    "broadcasts_broken",
)
"""Names of the counts since the start."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    event: str
    facts: dict[str, Any]
    level: str


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
        self.in_phase: dict[Phase, dict[str, Replica]] = {phase: {} for phase in Phase}
        """Replicas of each phase by name, as they entered it; a pause that is requested again enters later."""
        self._on_host: defaultdict[str, dict[str, Replica]] = defaultdict(dict)
        """Replicas of each host by name."""
        self.counts = dict.fromkeys(COUNTED, 0)
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

    def note(self, event: str, *, level: str = "info", **facts: Any) -> None:
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

    def close(self, name: str, *, incarnation: float = float("inf")) -> None:
        """Close a caller's question, unless an incarnation above ``incarnation`` has asked it."""
        if name in self._open and self._open[name].incarnation <= incarnation:
            del self._open[name]

    def wake(self, name: str) -> None:
        """Record that the caller's open question, if any, may have an answer now."""
        if name in self._open:
            self._woken.add(name)

    # --- replicas ---

    def add(self, replica: Replica) -> None:
        """Add a new replica."""
        self.by_name[replica.name] = self.in_phase[replica.phase][replica.name] = replica
        self._on_host[replica.host][replica.name] = replica

    def remove(self, replica: Replica) -> None:
        """Remove a dead replica, also from its phase and its host."""
        self._wake_beside(replica)
        del self.by_name[replica.name], self.in_phase[replica.phase][replica.name]
        del self._on_host[replica.host][replica.name]

    def settle_in(self, replica: Replica, host: str) -> None:
        """Record the host of a replica, which may have changed."""
        del self._on_host[replica.host][replica.name]
        replica.host = host
        self._on_host[host][replica.name] = replica

    def of(self, *phases: Phase) -> Iterator[Replica]:
        """Replicas in one of these phases."""
        return chain.from_iterable(self.in_phase[phase].values() for phase in phases)

    def beside(self, replica: Replica) -> Collection[Replica]:
        """Return the replicas on the same host, itself included."""
        return self._on_host[replica.host].values()

    def _wake_beside(self, replica: Replica) -> None:
        """Wake all replicas on the same host."""
        for other in self.beside(replica):
            self.wake(other.name)

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
            self.note("phase", level="debug", replica=replica.name, phase=str(replica.phase))
        # A repeated request for a pause begins the phase again.
        if replica.phase is not phase_before or replica.phase is Phase.LOADING:
            del self.in_phase[phase_before][replica.name]
            self.in_phase[replica.phase][replica.name] = replica
        if event is ReplicaEvent.COMMITTED:
            self.counts["updates_committed"] += 1
            replica.failed_attempts, replica.failed_version = 0, -1
        elif replica.phase is Phase.BEHIND and phase_before is not Phase.BEHIND:
            self.counts["updates_failed"] += 1
        if event not in MESSAGES:
            self.wake(replica.name)
        return True

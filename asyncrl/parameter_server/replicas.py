"""A replica as the conductor sees it: its phase, and the one table by which phases change. Pure.

A replica is one rollouter's engine. Its events are its own words and the conductor's decisions. A word that has no
place in the present phase is late, or repeated, or meant for a conductor that is no more: it changes nothing. A
decision that has none is a mistake of ours. docs/weights.md draws the table, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Phase of a replica."""

    SERVING = "serving"
    """Nothing is under way; the replica serves a version, or none yet."""
    STAGING = "staging"
    """The replica fetches and verifies a version while it generates."""
    WAITING = "waiting"
    """The version is all there; the replica waits for its turn to pause."""
    LOADING = "loading"
    """The replica's pause is granted; it pauses, loads, and resumes."""
    BEHIND = "behind"
    """The replica's last update did not end in a commit. It takes part in no broadcast until one does."""
    ANNOUNCED = "announced"
    """The replica is a member of a broadcast, and has not paused for it yet."""
    PAUSED = "paused"
    """The replica has paused for the broadcast, and waits for the other members."""
    RECEIVING = "receiving"
    """The broadcast has begun; the replica receives, verifies, loads, and resumes."""
    REGROUPING = "regrouping"
    """The broadcast broke by no fault of the replica, a member of the next one. Its engine stays paused meanwhile."""


class ReplicaEvent(StrEnum):
    """Events that move a replica from phase to phase."""

    IDLE = "idle"
    """NextUpdate: the replica has nothing staged and nothing paused any more."""
    ASKED = "asked"
    """RequestPause."""
    JOINED = "joined"
    """JoinBroadcast."""
    COMMITTED = "committed"
    """ReportUpdate: the replica serves the version."""
    FAILED = "failed"
    """ReportUpdate: the replica does not serve it; or it gave up its wait."""
    LOST = "lost"
    """ReportUpdate: the broadcast broke off under the replica."""
    OFFERED = "offered"
    """A version was offered to the replica by a rolling transport."""
    GRANTED = "granted"
    """The replica may pause."""
    INVITED = "invited"
    """The replica was made a member of a broadcast."""
    BEGUN = "begun"
    """All members are paused."""
    CALLED_OFF = "called_off"
    """The broadcast does not begin, by no fault of this replica."""
    BROKEN = "broken"
    """The broadcast broke off, or took too long."""
    OVERDUE = "overdue"
    """The replica did not come to the others, or staged or held its pause for too long."""


WORDS = frozenset(
    {
        ReplicaEvent.IDLE,
        ReplicaEvent.ASKED,
        ReplicaEvent.JOINED,
        ReplicaEvent.COMMITTED,
        ReplicaEvent.FAILED,
        ReplicaEvent.LOST,
    }
)
"""Events that are a replica's own words."""

_P, _E = Phase, ReplicaEvent
TRANSITIONS: dict[tuple[Phase, ReplicaEvent], Phase] = {
    (_P.SERVING, _E.IDLE): _P.SERVING,
    (_P.SERVING, _E.OFFERED): _P.STAGING,
    (_P.SERVING, _E.INVITED): _P.ANNOUNCED,
    # An update that was begun with an earlier parameter server is ended with this one.
    (_P.SERVING, _E.ASKED): _P.WAITING,
    (_P.SERVING, _E.COMMITTED): _P.SERVING,
    (_P.SERVING, _E.FAILED): _P.BEHIND,
    # --- rolling ---
    (_P.STAGING, _E.IDLE): _P.BEHIND,
    (_P.STAGING, _E.ASKED): _P.WAITING,
    (_P.STAGING, _E.FAILED): _P.BEHIND,
    (_P.STAGING, _E.OVERDUE): _P.BEHIND,
    (_P.WAITING, _E.IDLE): _P.BEHIND,
    (_P.WAITING, _E.ASKED): _P.WAITING,
    (_P.WAITING, _E.GRANTED): _P.LOADING,
    (_P.WAITING, _E.FAILED): _P.BEHIND,
    (_P.LOADING, _E.IDLE): _P.BEHIND,
    (_P.LOADING, _E.ASKED): _P.LOADING,
    (_P.LOADING, _E.COMMITTED): _P.SERVING,
    (_P.LOADING, _E.FAILED): _P.BEHIND,
    (_P.LOADING, _E.OVERDUE): _P.BEHIND,
    (_P.BEHIND, _E.IDLE): _P.BEHIND,
    (_P.BEHIND, _E.OFFERED): _P.STAGING,
    # The replica went on with an update that was given up here.
    (_P.BEHIND, _E.ASKED): _P.WAITING,
    (_P.BEHIND, _E.COMMITTED): _P.SERVING,
    (_P.BEHIND, _E.FAILED): _P.BEHIND,
    # --- by broadcast ---
    (_P.ANNOUNCED, _E.IDLE): _P.ANNOUNCED,
    (_P.ANNOUNCED, _E.JOINED): _P.PAUSED,
    (_P.ANNOUNCED, _E.FAILED): _P.BEHIND,
    (_P.ANNOUNCED, _E.OVERDUE): _P.BEHIND,
    (_P.ANNOUNCED, _E.CALLED_OFF): _P.SERVING,
    (_P.PAUSED, _E.IDLE): _P.BEHIND,
    (_P.PAUSED, _E.JOINED): _P.PAUSED,
    (_P.PAUSED, _E.FAILED): _P.BEHIND,
    (_P.PAUSED, _E.BEGUN): _P.RECEIVING,
    (_P.PAUSED, _E.CALLED_OFF): _P.SERVING,
    (_P.RECEIVING, _E.IDLE): _P.BEHIND,
    (_P.RECEIVING, _E.JOINED): _P.RECEIVING,
    (_P.RECEIVING, _E.COMMITTED): _P.SERVING,
    (_P.RECEIVING, _E.FAILED): _P.BEHIND,
    (_P.RECEIVING, _E.LOST): _P.REGROUPING,
    (_P.RECEIVING, _E.BROKEN): _P.REGROUPING,
    (_P.REGROUPING, _E.IDLE): _P.REGROUPING,
    (_P.REGROUPING, _E.LOST): _P.REGROUPING,
    (_P.REGROUPING, _E.INVITED): _P.ANNOUNCED,
    # There will be no next broadcast, or not soon.
    (_P.REGROUPING, _E.OFFERED): _P.STAGING,
    # The replica had received everything before the break.
    (_P.REGROUPING, _E.COMMITTED): _P.SERVING,
    (_P.REGROUPING, _E.FAILED): _P.BEHIND,
}

IDLE_PHASES = frozenset({Phase.SERVING, Phase.BEHIND, Phase.REGROUPING})
"""Phases in which no update is under way."""
FAILED_PHASES = frozenset({Phase.BEHIND, Phase.REGROUPING})
"""Phases in which the last update did not end in a commit."""
ELIGIBLE_PHASES = frozenset({Phase.SERVING, Phase.REGROUPING})
"""Phases in which a replica can be made a member of a broadcast."""
BROADCAST_PHASES = frozenset({Phase.ANNOUNCED, Phase.PAUSED, Phase.RECEIVING})
"""Phases of the members of a broadcast."""


@dataclass(slots=True)
class Replica:
    """One rollouter's engine. Times are the conductor's, in seconds."""

    name: str
    incarnation: int
    serving: int = -1
    """Version that the replica serves, by its own last word; it may be above any version known here."""
    engine: int = 0
    """Number of engines that the replica has had: a new one is in no process group."""
    workers: int = 1
    on_gpu: bool = False
    same_host: bool = False
    """Whether the replica can open the segments that are held here."""
    host: str = ""
    """Host of the replica: replicas of the same one can open each other's segments; empty where that is not known."""
    fetches: bool = False
    """Whether the replica brings the version that it stages to its host over the network."""
    held_version: int = -1
    """Version that the replica has brought to its host, and holds for the others there; -1 for none."""
    held_paths: tuple[str, ...] = ()
    """Paths of that version's segments."""
    waits_for: str = ""
    """Name of the replica on the same host that fetches the version that this one is to take over."""
    source_paths: tuple[str, ...] = ()
    """Paths of the segments on its host that the replica was offered."""
    phase: Phase = Phase.SERVING
    target: int = -1
    """The version being taken over; -1 in an idle phase."""
    staging_since: float = 0.0
    """Time at which the replica was offered the version that it stages."""
    seniority: int = 0
    """Place among the replicas that try to come to a newer version: lower for longer tries; 0 without a try."""
    outrun: bool = False
    """Whether the version that the replica stages is no longer held here."""
    paused_since: float = 0.0
    """Time at which the replica's pause was granted, or last asked for again."""
    heard: float = 0.0
    """Time at which the replica last said something, or was last answered."""
    failed_version: int = -1
    failed_attempts: int = 0
    """Failed attempts at ``failed_version``, without a commit since."""

    def follow(self, event: ReplicaEvent) -> bool:
        """Go to the phase that the table gives; False for a word that has no place in this phase."""
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            assert event in WORDS, f"{self.name} is {self.phase}: {event}"
            return False
        if phase in FAILED_PHASES and self.phase not in FAILED_PHASES:
            self.failed_attempts = self.failed_attempts + 1 if self.target == self.failed_version else 1
            self.failed_version = self.target
        self.phase = phase
        if phase in IDLE_PHASES:
            self.target = -1
        return True

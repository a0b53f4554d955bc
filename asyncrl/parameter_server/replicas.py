"""A replica as the conductor sees it: its phase, and the one table by which phases change. Pure.

A replica is one rollouter's engine. Its events are its own words and the conductor's decisions. A word that has no
place in the present phase is late, or repeated, or meant for a conductor that is no more: it changes nothing. A
decision that has none is a mistake of ours. docs/weights.md draws the table, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where a replica stands."""

    SERVING = "serving"
    """Nothing under way; it serves a version, or none yet."""
    STAGING = "staging"
    """It fetches and verifies a version while it generates."""
    WAITING = "waiting"
    """Everything is there; it waits for its turn to pause."""
    LOADING = "loading"
    """Its pause is granted; it pauses, loads, and resumes."""
    BEHIND = "behind"
    """Its last update did not end in a commit. It takes part in no broadcast until one does."""
    ANNOUNCED = "announced"
    """It is a member of a broadcast, and has not paused for it yet."""
    PAUSED = "paused"
    """It has paused for the broadcast, and waits for the other members."""
    RECEIVING = "receiving"
    """The broadcast has begun; it receives, verifies, loads, and resumes."""
    REGROUPING = "regrouping"
    """Its broadcast broke by no fault of its own: it is a member of the next one. Its engine stays paused meanwhile."""


class Event(StrEnum):
    """What moves a replica from phase to phase."""

    IDLE = "idle"
    """NextUpdate: it has nothing staged and nothing paused any more."""
    ASKED = "asked"
    """RequestPause."""
    JOINED = "joined"
    """JoinBroadcast."""
    COMMITTED = "committed"
    """ReportUpdate: it serves the version."""
    FAILED = "failed"
    """ReportUpdate: it does not; or it gave up what it was waiting for."""
    LOST = "lost"
    """ReportUpdate: the broadcast broke off under it."""
    OFFERED = "offered"
    """A version was offered to it by a rolling transport."""
    GRANTED = "granted"
    """It may pause."""
    INVITED = "invited"
    """It was made a member of a broadcast."""
    BEGUN = "begun"
    """All members are paused."""
    CALLED_OFF = "called_off"
    """The broadcast does not begin; whose fault it was, it was not this replica's."""
    BROKEN = "broken"
    """The broadcast broke off, or took too long."""
    OVERDUE = "overdue"
    """It did not come to the others, or staged or held its pause for too long."""


WORDS = frozenset({Event.IDLE, Event.ASKED, Event.JOINED, Event.COMMITTED, Event.FAILED, Event.LOST})
"""Events that are a replica's own words."""

_P, _E = Phase, Event
TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (_P.SERVING, _E.IDLE): _P.SERVING,
    (_P.SERVING, _E.OFFERED): _P.STAGING,
    (_P.SERVING, _E.INVITED): _P.ANNOUNCED,
    # What it took up with an earlier parameter server is ended with this one.
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
    # It went on with an update that was given up here.
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
    # There will be no next one, or not soon.
    (_P.REGROUPING, _E.OFFERED): _P.STAGING,
    # It had received everything before the break.
    (_P.REGROUPING, _E.COMMITTED): _P.SERVING,
    (_P.REGROUPING, _E.FAILED): _P.BEHIND,
}

IDLE_PHASES = frozenset({Phase.SERVING, Phase.BEHIND, Phase.REGROUPING})
"""No update is under way."""
FAILED_PHASES = frozenset({Phase.BEHIND, Phase.REGROUPING})
"""The last update did not end in a commit."""
ELIGIBLE_PHASES = frozenset({Phase.SERVING, Phase.REGROUPING})
"""It can be made a member of a broadcast."""
GATHERING_PHASES = frozenset({Phase.ANNOUNCED, Phase.PAUSED})
"""A member of a broadcast that has not begun."""
BROADCAST_PHASES = GATHERING_PHASES | {Phase.RECEIVING}
"""A member of a broadcast."""


@dataclass(slots=True)
class Replica:
    """One rollouter's engine. Times are the conductor's, in seconds."""

    name: str
    incarnation: int
    serving: int = -1
    """By its own last word; it may be above any version known here."""
    engine: int = 0
    """Counts the engines it has had: a new one is in no process group."""
    workers: int = 1
    on_gpu: bool = False
    same_host: bool = False
    """Whether it can open the segments that are held here."""
    host: str = ""
    """Replicas of the same value can open each other's segments; empty where that is not known."""
    fetches: bool = False
    """What it stages it brings to its host over the network."""
    held_version: int = -1
    """What it has brought to its host, and holds for the others there; -1 for nothing."""
    held_paths: tuple[str, ...] = ()
    """Of that version's segments."""
    waits_for: str = ""
    """Who of its host fetches what it is to take over."""
    source_paths: tuple[str, ...] = ()
    """Of the segments on its host that it was offered."""
    phase: Phase = Phase.SERVING
    target: int = -1
    """The version being taken over; -1 in an idle phase."""
    staging_since: float = 0.0
    """When it was offered what it stages."""
    seniority: int = 0
    """Lower for who tries for longer to come to a newer version; 0 for who does not try."""
    outrun: bool = False
    """What it stages is no longer held here."""
    paused_since: float = 0.0
    """When its pause was granted, or last asked for again."""
    heard: float = 0.0
    """When it last said something, or was last answered."""
    failed_version: int = -1
    failed_attempts: int = 0
    """At ``failed_version``, without a commit since."""

    def follow(self, event: Event) -> bool:
        """Go where the table leads; False for a word that has no place in this phase."""
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

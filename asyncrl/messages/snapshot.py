"""The state of a run at one moment: asyncrl-top shows it, ``--json`` prints it, and a replay reads it.

The controller builds it from heartbeats, records it in the run folder and sends it to viewers. Times are durations in
seconds, except ``wall`` (Unix time, s). Counters and the seconds of a state count from the start of an incarnation. A
rate divides by the time between two heartbeats, by ``heard_s`` (observe/snapshots/rates.py). docs/metrics.md lists the
names of metrics.

Invariant: fields are only added; a change that breaks readers of older snapshots raises SCHEMA. Snapshots are never
part of a reference cycle, so the garbage collector ignores them (``gc=False``).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

SCHEMA = 1
OVER = frozenset({"done", "failed"})
"""Phases of a run that is over."""
ENDING = OVER | {"draining"}
"""Phases in which actors end as planned."""
Count = Annotated[int, Meta(ge=0)]


class Wait(Struct, gc=False, frozen=True):
    """An open wait of an actor; see rpc/awaits.py."""

    whom: str
    """Name of what the actor waits for: another actor, a role (any actor of it), or something inside itself."""
    what: str
    seconds: float
    """Seconds that the wait has lasted; of several waits for the same, the longest."""
    idle: bool = False
    """Whether the wait is normal idleness, and no sign of trouble."""


class Resource(Struct, gc=False, frozen=True, kw_only=True):
    """A serial resource: an engine, a learner rank, a reward worker. It is in exactly one state at any time.

    observe/states.py keeps the times; a heartbeat carries them.
    """

    name: str
    """engine, rank, worker/3."""
    state: str
    """One of the closed set of its kind; see observe/states.py."""
    awaiting: str = ""
    """Name of the actor or thing that the state waits for."""
    state_s: float = 0.0
    """Seconds in the present state."""
    seconds: dict[str, float]
    """Seconds by state in the resource's last record; they never shrink. With ``since_s`` in the present state they add
    up to its age at the last heartbeat of its actor."""
    since_s: float = 0.0
    """Seconds in the present state from that record to the last heartbeat."""

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by state up to the last heartbeat of the resource's actor."""
        return {**self.seconds, self.state: self.seconds.get(self.state, 0.0) + self.since_s}


class Gpu(Struct, gc=False, frozen=True, kw_only=True):
    """A GPU that an actor uses."""

    index: Count
    utilisation: float | None
    """Share of the last interval, 0 to 1; None for a part of a GPU (MIG), which does not report it."""
    memory_bytes: Count
    memory_total_bytes: Count


class Histogram(Struct, gc=False, frozen=True, array_like=True):
    """Counts by fixed buckets, whose edges are in the metric's declaration (observe/catalogue.py)."""

    counts: list[Count]
    """Counts by bucket, one more than there are edges: the last bucket is open above."""
    sum: float


class ActorView(Struct, gc=False, frozen=True, kw_only=True):
    """An actor, or one that is dead and not replaced yet."""

    name: str
    """ROLE/INDEX."""
    host: str
    pid: Count = 0
    incarnation: Count = 0
    condition: str
    """absent, starting, ready, silent, condemned, dead, lost (with its host), aside."""
    state: str = ""
    """State that the actor reports."""
    awaiting: str = ""
    state_s: float = 0.0
    heard_s: float = 0.0
    """Seconds since the actor's last heartbeat or registration."""
    restarts: Count = 0
    version: int = -1
    """Newest version of the weights that the actor knows."""
    loop_lag_s: float = 0.0
    """Largest lag of its event loop since the last heartbeat."""
    loop_busy: float = 0.0
    """Share of the last interval in which its event loop's thread used a processor, 0 to 1."""
    cpu: float = 0.0
    """Processors used by the process and its children over the last interval; 1 is one core."""
    rss_bytes: Count = 0
    """Resident memory of the process and its children."""
    waits: list[Wait] = []
    """Open waits, the oldest first."""
    resources: list[Resource] = []
    metrics: dict[str, float] = field(name="figures", default_factory=dict)
    """Counters and gauges by name; ``figures`` in MessagePack and JSON."""
    histograms: dict[str, Histogram] = {}
    gpus: list[Gpu] = []


class Event(Struct, gc=False, frozen=True, kw_only=True):
    """Something that happened, of level info, warning or error."""

    number: Count
    """Ascending within one controller; in a heartbeat, within one incarnation."""
    wall: float
    """Unix time (s)."""
    level: str
    actor: str = ""
    """The actor that it happened to; empty for the run, and in a heartbeat."""
    text: str


class RunView(Struct, gc=False, frozen=True, kw_only=True):
    """The run as a whole."""

    name: str
    run_id: str
    phase: str
    """RunPhase."""
    attempt: Count
    age_s: float
    """Seconds since the first controller of this attempt started, by a monotonic clock."""
    step: Count
    steps: Count
    version: int
    reason: str = ""
    exit_code: int = 0
    waiting_for: list[str] = []
    lost_hosts: list[str] = []
    stalled: str = ""
    """The stall report, while the run is stalled."""
    staleness_max: Count = 0
    groups_per_step: Count = 0
    disk_free_bytes: Count | None = None
    """Bytes free on the disk of the run folder; None if unknown."""
    aside: dict[str, str] = {}
    """Replicas that are set aside, with the reasons."""


class Snapshot(Struct, gc=False, frozen=True, kw_only=True):
    """A whole run at one moment."""

    schema: int = SCHEMA
    wall: float
    run: RunView
    actors: list[ActorView]
    """Actors, sorted by role, then number."""
    train: list[dict[str, Any]] = []
    """The newest lines of kind train of metrics.jsonl, oldest first (at most TRAIN_LINES)."""
    updates: list[dict[str, Any]] = []
    """The newest lines of kind update, oldest first (at most UPDATE_LINES)."""
    evals: list[dict[str, Any]] = []
    """The newest line of each evaluation."""
    events: list[Event] = []
    """The newest events, oldest first (at most EVENTS)."""


TRAIN_LINES = 64
UPDATE_LINES = 32
EVENTS = 200

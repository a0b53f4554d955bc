"""Heartbeats of actors, the snapshot of a run that the controller builds from them, and the requests for snapshots.

A snapshot is the state of a run at one moment. The controller records it in the run folder, and sends it to viewers and
sinks: asyncrl-top shows it, ``--json`` prints it, and a replay reads it. An Interval has the changes between two
snapshots: rates of counters, shares of states.

Times are durations in seconds, except ``wall`` (Unix time, s). Counters and the seconds of a state count from the start
of an incarnation. The metrics of an actor are as old as its last heartbeat, so a rate divides by the time between two
heartbeats. docs/metrics.md lists the names of metrics.

Invariants: fields are only added; a change that breaks readers of older snapshots raises SCHEMA. An unknown rate or
share is missing, never 0. A rate is unknown without a value, without a heartbeat between the snapshots, and after a
restart of the actor. Snapshots are never part of a reference cycle, so the garbage collector ignores them
(``gc=False``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from asyncrl.messages import LEARNER, MEMBERS, SINKS, VIEWER, Count, Done, Message, Request

SCHEMA = 2
OVER = frozenset({"done", "failed"})
"""Phases of a run that is over."""
ENDING = OVER | {"draining"}
"""Phases in which actors end as planned."""
TRAIN_LINES = 64
UPDATE_LINES = 32
EVENTS = 200
MOST_UNREACHED = 8
"""Most unreachable actors that a heartbeat names."""


# --- what both have ---


class Wait(Struct, gc=False, frozen=True):
    """An open wait of an actor; see rpc/awaits.py."""

    whom: str
    """Name of what the actor waits for: another actor, a role (any actor of it), or something inside itself."""
    what: str
    """Type of the repeated request, or another word for the purpose."""
    seconds: float
    """Seconds that the wait has lasted; of several waits for the same, the longest."""
    idle: bool = False
    """Whether the wait is normal idleness, and no sign of trouble."""


class Resource(Struct, gc=False, frozen=True, kw_only=True):
    """A serial resource: an engine, a learner rank, a reward worker. It is in exactly one state at any time.

    observe/state_ledger.py keeps the times; a heartbeat carries them.
    """

    name: str
    """engine, rank, worker/3."""
    state: str
    """One of the closed set of its kind; see core/states.py."""
    awaiting: str = ""
    """Name of the actor or thing that the state waits for."""
    state_s: float = 0.0
    """Seconds in the present state."""
    seconds: dict[str, float]
    """Seconds by state in the resource's last record; they shrink only if it is replaced. With ``since_s`` in the
    present state they add up to its age at the last heartbeat of its actor."""
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


# --- heartbeats ---


class UnreachedRecord(Struct, gc=False, frozen=True, array_like=True):
    """An actor that the reporting actor calls and cannot reach; see unreached_s of rpc/calls/connection.py."""

    whom: str
    """Name of the unreachable actor."""
    seconds: float
    """Seconds for which it has been unreachable, on the clock of the reporting actor."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Actor to controller, cast from a thread of its own: the actor lives, and this is its state.

    ``beat`` counts the heartbeats of an incarnation. Counters are cumulative since the incarnation's start. A heartbeat
    carries the counters that have changed, and from time to time all (rpc/heartbeat.py). Those left out are unchanged,
    or wait for a later heartbeat.
    """

    senders = MEMBERS
    beat: Count
    state: str
    """starting, ready, or another state of the actor."""
    loop_lag_s: float = 0.0
    """Largest lag of its event loop since the last heartbeat, including one that has not ended."""
    awaiting: str = ""
    """Actor or thing that the state waits for."""
    state_s: float = 0.0
    """Seconds in the present state."""
    # As many as MOST_RECORDS of rpc/awaits.py.
    awaits: Annotated[list[Wait], Meta(max_length=8)] = []
    """Open waits, the oldest first."""
    counters: dict[str, float] = {}
    """Counters and gauges; names, kinds and units are in observe/catalogue.py."""
    histograms: dict[str, Histogram] = {}
    """Histograms by name, with the buckets that the catalogue declares."""
    resources: list[Resource] = []
    """Its serial resources. If there are too many for one heartbeat, several take turns."""
    held_back: bool = False
    """Whether changed resources are left out, for a later heartbeat. If False, those left out are unchanged."""
    loop_busy: float = 0.0
    """Share of the last interval in which its event loop's thread used a processor."""
    cpu: float = 0.0
    """Processors used by the process and its children over the last interval; 1 is one core."""
    rss_bytes: Count = 0
    """Memory (RSS) of the process and its children."""
    gpus: list[Gpu] = []
    """The GPUs that it may use, if their driver can be queried."""
    left_out: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of heartbeats that the actor may skip after this one, while nothing changes."""
    events: list[Event] = []
    """Lines of its log of level warning or above, of the last few heartbeats, the oldest first. Their numbers ascend
    from 1 in each incarnation. An event is repeated in several heartbeats, with the same number."""
    unreached: Annotated[list[UnreachedRecord], Meta(max_length=MOST_UNREACHED)] = []
    """Actors that it cannot reach, the longest unreachable first."""


# --- the snapshot ---


class ActorView(Struct, gc=False, frozen=True, kw_only=True):
    """An actor, or one that is dead and not replaced yet."""

    name: str
    """ROLE/INDEX."""
    host: str
    pid: Count = 0
    incarnation: Count = 0
    condition: str
    """absent, starting, ready, silent, condemned, dead, lost (with its host), resting."""
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
    """Largest lag of its event loop in the interval before its last heartbeat."""
    loop_busy: float = 0.0
    """Share of the last interval in which its event loop's thread used a processor, 0 to 1."""
    cpu: float = 0.0
    """Processors used by the process and its children over the last interval; 1 is one core."""
    rss_bytes: Count = 0
    """Resident memory of the process and its children."""
    waits: list[Wait] = []
    """Open waits, the oldest first."""
    resources: list[Resource] = []
    metrics: dict[str, float] = {}
    """Counters and gauges by name."""
    histograms: dict[str, Histogram] = {}
    gpus: list[Gpu] = []


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
    """Steps of the whole run (learner.steps)."""
    version: int
    """Newest version of the weights that any actor knows; -1 before the first."""
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
    resting: dict[str, str] = {}
    """Resting replicas, with the reasons."""


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


decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
"""Decodes a snapshot from MessagePack. Raises msgspec.DecodeError."""


# --- two snapshots ---

Shares = dict[str, float]
"""Shares by state, 0 to 1; they add up to 1."""


class Interval:
    """The changes between two snapshots of one run.

    Without an older one there are no rates, and shares cover the time since the start.
    """

    def __init__(self, older: Snapshot | None, newer: Snapshot) -> None:
        # By the age of the run, because the Unix clock may be set.
        self.seconds = 0.0 if older is None else max(0.0, newer.run.age_s - older.run.age_s)
        self._older = {} if older is None else {actor.name: actor for actor in older.actors}

    def before(self, actor: ActorView) -> ActorView | None:
        """The same process in the older snapshot, if that has it."""
        earlier = self._older.get(actor.name)
        return earlier if earlier is not None and earlier.incarnation == actor.incarnation else None

    def rate(self, actor: ActorView, name: str) -> float | None:
        """Return a counter's increase per second between the last heartbeats before both snapshots; None if unknown."""
        value, before = actor.metrics.get(name), self.before(actor)
        if value is None or before is None:
            return None
        # ``heard_s`` is the age of the last heartbeat. Below 0.1 s, both snapshots have the same heartbeat.
        seconds = self.seconds - actor.heard_s + before.heard_s
        return max(0.0, value - before.metrics.get(name, 0.0)) / seconds if seconds > 0.1 else None

    def seconds_by_state(self, actor: ActorView, resource: Resource) -> dict[str, float]:
        """Return the seconds that a resource spent in each state in the interval, or since its start.

        If the older snapshot lacks a resource that is older than the interval, its state "starting" loses the time
        before the interval. If the sum still exceeds the interval, the result is empty: the times are unknown.
        """
        before = self.before(actor)
        earlier: Mapping[str, float] = {}
        if before is not None:
            earlier = next((each.spent for each in before.resources if each.name == resource.name), {})
        spent = resource.spent
        # The seconds of a resource that was replaced inside its actor begin at 0.
        if sum(spent.values()) < sum(earlier.values()) - 1e-6:
            earlier = {}
        if not earlier and 0.0 < self.seconds < (age := sum(spent.values())):
            starting_s = max(0.0, spent.get("starting", 0.0) - (age - self.seconds))
            spent_here = {**spent, "starting": starting_s}
            # Rounding may make the sum a little larger than the interval.
            return _without_zeros(spent_here) if sum(spent_here.values()) <= self.seconds + 1e-6 else {}
        return _without_zeros({state: seconds - earlier.get(state, 0.0) for state, seconds in spent.items()})

    def shares(self, resources: Iterable[tuple[ActorView, Resource]]) -> Shares:
        """Return the shares of states in the summed time of all ``resources``; empty if no time has passed."""
        sums: dict[str, float] = {}
        for actor, resource in resources:
            for state, seconds in self.seconds_by_state(actor, resource).items():
                sums[state] = sums.get(state, 0.0) + seconds
        whole = sum(sums.values())
        return {state: seconds / whole for state, seconds in sums.items()} if whole > 0 else {}

    def histogram(self, actor: ActorView, name: str) -> Histogram | None:
        """Return the values that a histogram counted in the interval; None if the actor has no such histogram.

        Without the same process or the same buckets in the older snapshot, all values count.
        """
        after, before = actor.histograms.get(name), self.before(actor)
        if after is None:
            return None
        earlier = before.histograms.get(name) if before is not None else None
        if earlier is None or len(earlier.counts) != len(after.counts):
            return after
        counts = [max(0, new - old) for new, old in zip(after.counts, earlier.counts, strict=True)]
        return Histogram(counts, max(0.0, after.sum - earlier.sum))


def _without_zeros(seconds: dict[str, float]) -> dict[str, float]:
    return {state: each for state, each in seconds.items() if each > 1e-9}


# --- requests ---


class MetricsLine(Message, frozen=True, kw_only=True):
    """Learner to controller, cast: a line that was just written to metrics.jsonl."""

    senders = LEARNER
    line: dict[str, Any]


class Metrics(Message, frozen=True, kw_only=True):
    """The next lines of metrics.jsonl, and the newest snapshot of the run."""

    lines: list[dict[str, Any]] = []
    line: Count
    """Number of the last of these lines; without any, of the newest line that the controller has queued."""
    snapshot_number: Count
    """Number of the newest snapshot."""
    snapshot: bytes = b""
    """The snapshot in MessagePack; empty if the caller has seen it."""
    last: bool = False
    """Whether the caller has all lines and no more will come."""


class WatchMetrics(Request, frozen=True, kw_only=True):
    """Sinks to controller, parked until there are lines after ``line`` or a snapshot other than ``snapshot_number``.

    The controller forgets the lines up to ``line``.
    """

    reply = Metrics
    senders = SINKS
    idle = True
    line: Count = 0
    snapshot_number: Count = 0


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """``snapshot`` is a Snapshot in MessagePack; empty if there was no new one for the caller in time."""

    number: int
    snapshot: bytes = b""


class WatchSnapshot(Request, frozen=True, kw_only=True):
    """Viewer to controller, parked until there is a snapshot of the run with another number than ``seen``."""

    reply = SnapshotTaken
    senders = VIEWER
    idle = True
    seen: int = -1


class TraceWritten(Message, frozen=True, kw_only=True):
    """The trace was written to ``path`` on the controller's host, or not, with the reason in ``error``."""

    path: str
    error: str = ""
    actors: list[str] = []
    """Actors whose spans are in it."""
    missing: list[str] = []
    """Actors that did not send their spans in time."""


class RequestTrace(Request, frozen=True, kw_only=True):
    """Viewer to controller: write the recent spans of all actors to a file. Parked until it is written."""

    reply = TraceWritten
    senders = VIEWER


class TraceSpan(Struct, gc=False, frozen=True, array_like=True):
    """Something that an actor did, with its beginning and length; see observe/trace.py."""

    track: Annotated[str, Meta(min_length=1, max_length=100)]
    # The numbers of tracks in a trace file allow this many tracks for an actor (observe/trace.py).
    order: Annotated[int, Meta(ge=0, lt=100_000)]
    """Position of the track among the tracks of its actor; different tracks have different positions."""
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    began: float
    """Unix time (s)."""
    seconds: float
    """Length of the span; negative while it is open."""
    facts: dict[str, str | int | float | bool] = {}


class TracePart(Request, frozen=True, kw_only=True):
    """Actor to controller: a part of its spans, oldest first. Sent if RunState.trace requests them, or it ends."""

    reply = Done
    senders = MEMBERS
    # Repeated spans would be in the file twice.
    idempotent = False
    number: Count
    """RunState.trace, or 0 if the actor ends."""
    spans: Annotated[list[TraceSpan], Meta(max_length=2000)]
    last: bool = False

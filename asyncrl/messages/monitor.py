"""Heartbeats and metrics of actors, and the requests of viewers and sinks to the controller."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from asyncrl.messages import LEARNER, MEMBERS, SINKS, VIEWER, Count, Done, Message, Request
from asyncrl.messages.snapshot import Event, Gpu, Histogram, Resource, Wait

MOST_UNREACHED = 8
"""Actors out of reach that a heartbeat names."""


class UnreachedRecord(Struct, gc=False, frozen=True, array_like=True):
    """An actor that is asked for and not reached; see unreached_s of rpc/calls/connection.py."""

    whom: str
    seconds: float
    """Time that it has lasted, on the clock of the reporting actor."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Actor to controller, cast from a thread of its own.

    ``beat`` counts the heartbeats of an incarnation. Counters are cumulative since its start. A heartbeat carries those
    that have changed, and from time to time all (rpc/heartbeat.py). Those that it leaves out are unchanged.
    """

    senders = MEMBERS
    beat: Count
    state: str
    """starting, ready, or another state of the actor."""
    loop_lag_s: float = 0.0
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
    """Counts by the buckets of the catalogue."""
    resources: list[Resource] = []
    """Its serial resources, where there are more than a beat carries in turn."""
    held_back: bool = False
    """Whether resources that have changed had to wait: else those that are left out have stayed where they were."""
    loop_busy: float = 0.0
    """Share of the last interval in which its event loop's thread used a processor."""
    cpu: float = 0.0
    """Processors used by the process and its children over the last interval; 1 is one core."""
    rss_bytes: Count = 0
    """Memory (RSS) of the process and its children."""
    gpus: list[Gpu] = []
    """The GPUs that it may use, where they can be asked."""
    left_out: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of heartbeats that may be left out after this one, as nothing changes."""
    events: list[Event] = []
    """Lines of its log of level warning or above, of the last few beats, the oldest first. Their numbers ascend from 1
    in each incarnation; one that was heard before is the same event."""
    unreached: Annotated[list[UnreachedRecord], Meta(max_length=MOST_UNREACHED)] = []
    """Actors that it cannot reach, longest first."""


class MetricsLine(Message, frozen=True, kw_only=True):
    """Learner to controller, cast: a line that was just written to metrics.jsonl."""

    senders = LEARNER
    line: dict[str, Any]


class Metrics(Message, frozen=True, kw_only=True):
    """The next lines of metrics.jsonl, and the newest snapshot of the run, encoded; empty if it is the one seen."""

    lines: list[dict[str, Any]] = []
    line: Count
    """Number of the last line of these, or of the last that there is."""
    snapshot_number: Count
    """Number of the newest snapshot."""
    snapshot: bytes = b""
    last: bool = False
    """Whether all was taken and nothing more will come."""


class WatchMetrics(Request, frozen=True, kw_only=True):
    """Sinks to controller, parked until there are lines after ``line`` or a snapshot other than ``snapshot_number``.

    The controller forgets the lines up to that number.
    """

    reply = Metrics
    senders = SINKS
    idle = True
    line: Count = 0
    snapshot_number: Count = 0


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """``snapshot`` is a Snapshot (snapshot.py) in MessagePack; empty when there is no other than the one seen."""

    number: int
    snapshot: bytes = b""


class WatchSnapshot(Request, frozen=True, kw_only=True):
    """Viewer to controller, parked until there is another snapshot of the run than ``seen``."""

    reply = SnapshotTaken
    senders = VIEWER
    idle = True
    seen: int = -1


class TraceWritten(Message, frozen=True, kw_only=True):
    """The trace: its ``path`` on the controller's host, or the reason in ``error``."""

    path: str
    error: str = ""
    actors: list[str] = []
    """Actors whose spans are in it."""
    missing: list[str] = []
    """Actors that did not hand theirs in in time."""


class RequestTrace(Request, frozen=True, kw_only=True):
    """Viewer to controller: write the recent spans of all actors to a file. Parked until it is written."""

    reply = TraceWritten
    senders = VIEWER


class TraceSpan(Struct, gc=False, frozen=True, array_like=True):
    """Something that an actor did; see observe/trace.py."""

    track: Annotated[str, Meta(min_length=1, max_length=100)]
    # The numbers of tracks in a file leave room for so many of an actor (observe/trace.py).
    order: Annotated[int, Meta(ge=0, lt=100_000)]
    """Place of the track among those of its actor, and no other's."""
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    began: float
    """Unix time (s)."""
    seconds: float
    """Length of the span; negative while it is open."""
    facts: dict[str, str | int | float | bool] = {}


class TracePart(Request, frozen=True, kw_only=True):
    """Actor to controller: a part of its spans, oldest first, because RunState.trace asks for them or it ends."""

    reply = Done
    senders = MEMBERS
    # Spans that were taken in twice would be in the file twice.
    idempotent = False
    number: Count
    """RunState.trace; 0 at the end of an actor."""
    spans: Annotated[list[TraceSpan], Meta(max_length=2000)]
    last: bool = False

"""Heartbeats and metrics of actors, and the requests of viewers and sinks to the controller."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from asyncrl.messages import LEARNER, MEMBERS, SINKS, VIEWER, Count, Done, Message, Request
from asyncrl.messages.snapshot import Event, Gpu, Histogram, Resource, Wait

MOST_UNREACHED = 8
"""Most unreachable actors that a heartbeat names."""


class UnreachedRecord(Struct, gc=False, frozen=True, array_like=True):
    """An actor that the reporting actor calls and cannot reach; see unreached_s of rpc/calls/connection.py."""

    whom: str
    """Name of the unreachable actor."""
    seconds: float
    """Seconds for which it has been unreachable, on the clock of the reporting actor."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Actor to controller, cast from a thread of its own: the actor lives, and this is its state.

    ``beat`` counts the heartbeats of an incarnation. Counters are cumulative since the incarnation's start. A heartbeat
    carries the counters that have changed, and from time to time all (rpc/heartbeat.py). Those left out are unchanged.
    """

    senders = MEMBERS
    beat: Count
    state: str
    """starting, ready, or another state of the actor."""
    loop_lag_s: float = 0.0
    """Largest lag of its event loop since the last heartbeat."""
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
    """``snapshot`` is a Snapshot (snapshot.py) in MessagePack; empty if there was no new one for the caller in time."""

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

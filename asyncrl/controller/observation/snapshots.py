"""Builds snapshots of the run when viewers, the recording or sinks need one, and sends them to viewers.

Without viewers, snapshots are built only for the recording and the sinks. Each is encoded once. Invariant: a viewer's
first snapshot is at most SNAPSHOT_S old, and a viewer never gets the same one twice.

A viewer may send requests and not read the answers, so that ZeroMQ's queue of its connection would grow. So a viewer
confirms each snapshot by its number, which it cannot guess. If it does not confirm, it waits twice as long for each
further one. It gets the last snapshot of the run in any case. Invariant: in a time T a connection gets at most
2 + log2(T / SNAPSHOT_S) unconfirmed snapshots and the last one.

A snapshot is built from the registry and the run's state machine. The times of an actor's present state and waits are
extended from its last heartbeat to now, while the actor is heard. The seconds of its resources by state are not
extended, so no later snapshot has smaller ones. A snapshot holds only values that an actor has sent, or that follow
from its end.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from asyncrl.controller.observation.recent_lines import RecentMetrics
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.roles import ROLES, role_of
from asyncrl.messages.monitor import ActorView, Heartbeat, Resource, RunView, Snapshot, SnapshotTaken, WatchSnapshot
from asyncrl.rpc.calls.handlers import Caller, Connection, handler
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.lifecycle.registry import Entry, HeardResource, Registry
from asyncrl.rpc.parking_lot import ParkingLot

if TYPE_CHECKING:
    from asyncrl.controller.observation.observation import Observation

SNAPSHOT_S = 0.5
"""Shortest time between two snapshots for viewers (s)."""
WATCHED_S = 15.0
"""Time after the last request of any viewer in which the run counts as watched (s)."""
LARGEST_STEP = 1 << 20
"""Largest random step from one snapshot's number to the next. A restarted controller begins at a number that such steps
reach only after two years."""
ACTORS_AT_ONCE = 64
"""Number of actors whose views are built before the event loop runs other tasks."""
SILENT_BEATS = 4
"""Number of missed heartbeats after which an actor counts as silent."""
UNKNOWN = frozenset({"silent", "condemned", "dead", "lost"})
"""Conditions in which the present state of an actor is unknown."""
NO_HEARTBEAT = Heartbeat(beat=0, state="")
"""The heartbeat of an actor that has not sent one."""


@dataclass(slots=True)
class Given:
    """The snapshots that were sent on one connection and not confirmed. Pure: the caller passes the time (s)."""

    unread: list[int] = field(default_factory=list)
    """Numbers of the snapshots, ascending."""
    last: float = 0.0
    """Time at which the newest unconfirmed snapshot was sent (s)."""

    def heard(self, seen: int) -> None:
        """Note that the viewer has confirmed the snapshot of this number, and thus all before it."""
        if seen in self.unread:
            del self.unread[: self.unread.index(seen) + 1]

    def may_have_more(self, now: float) -> bool:
        """Whether the viewer may get one more. The wait after the newest doubles with each unconfirmed one."""
        return not self.unread or now - self.last >= SNAPSHOT_S * 2.0 ** (len(self.unread) - 1)

    def give(self, number: int, now: float) -> None:
        """Note that the viewer gets the snapshot of this number."""
        self.unread.append(number)
        self.last = now


class Snapshots:
    """The snapshots of a run. ``observation`` adds events and lines of metrics, and records the encoded snapshots."""

    def __init__(self, controller: RunActor, observation: Observation) -> None:
        config = controller.config
        self._controller, self._registry, self._run = controller, controller.registry, controller.machine
        self._observation = observation
        self._record_s = config.monitor.record_s if config.monitor.record_bytes or config.sinks.are_wanted else None
        """Time between two recorded snapshots (s); None if neither the recording nor a sink needs them."""
        self._now = controller.clock.now
        self._encoder = msgspec.msgpack.Encoder()
        self._viewers = ParkingLot()
        """Calls of viewers, which wait for a new snapshot."""
        self._given: WeakKeyDictionary[Connection, Given] = WeakKeyDictionary()
        """By connection of a viewer: the snapshots that it has not confirmed."""
        self._number = numbers_begin_above(controller.context.incarnation)
        """Number of the newest snapshot, above all numbers of earlier controllers."""
        self._newest = b""
        """The newest snapshot, encoded; empty before the first."""
        self._taken_at = -math.inf
        self._last_request_at = -math.inf
        self._last_recorded_at = -math.inf
        self._is_last = False
        """Whether the newest snapshot is the last of the run."""
        self._wanted = asyncio.Event()
        """Set when a first viewer comes, so that ``run`` takes the next snapshot sooner."""
        self._taking = asyncio.Lock()
        """Held while a snapshot is taken."""

    async def run(self) -> None:
        """Take a snapshot whenever one is due for viewers or the recording; until cancelled."""
        while True:
            due = self._record_due
            if self._is_watched:
                due = min(due, self._taken_at + SNAPSHOT_S)
            self._wanted.clear()
            try:
                async with asyncio.timeout(None if due == math.inf else max(0.0, due - self._now())):
                    await self._wanted.wait()
                continue
            except TimeoutError:
                await self.take(record=self._now() >= self._record_due)

    @handler
    async def watch(self, request: WatchSnapshot, caller: Caller) -> SnapshotTaken:
        """Answer a viewer once there is a new snapshot for it. If its time ends first, answer without a snapshot.

        Takes a snapshot at once if the viewer may have one, and lacks the newest, which is older than SNAPSHOT_S.
        """
        was_watched = self._is_watched
        self._last_request_at = self._now()
        if not was_watched:
            self._wanted.set()
        given = self._given.setdefault(caller.connection, Given())
        given.heard(request.seen)
        park_s = caller.park_s
        if (
            given.may_have_more(self._now())
            and request.seen != self._number
            and self._now() - self._taken_at > SNAPSHOT_S
        ):
            async with self._taking:
                if self._now() - self._taken_at > SNAPSHOT_S:
                    await self._take_one(record=False)

        def news() -> SnapshotTaken | None:
            now = self._now()
            if not self._newest or self._number == request.seen:
                return None
            # Every viewer gets the run's last snapshot once, however many it has not confirmed.
            if not given.may_have_more(now) and not (self._is_last and self._number not in given.unread):
                return None
            given.give(self._number, now)
            return SnapshotTaken(number=self._number, snapshot=self._newest)

        # The number in an answer without a snapshot is the viewer's own, so it cannot confirm a newer one.
        return await self._viewers.until(news, park_s) or SnapshotTaken(number=request.seen)

    async def take(self, *, record: bool = False, last: bool = False) -> None:
        """Take a snapshot now. ``record`` it if set; ``last`` marks the last one of the run, which all viewers get."""
        async with self._taking:
            self._is_last = last
            await self._take_one(record=record)

    async def _take_one(self, *, record: bool) -> None:
        """Build and encode a snapshot, give it the next number, and wake the viewers. A failure is counted only."""
        began, counters = self._now(), self._controller.counters
        try:
            snapshot = await self.build()
            self._newest = self._encoder.encode(snapshot)
        except Exception as error:
            # A failed snapshot never ends the run. It counts as taken, so that the next try waits.
            self._taken_at = self._now()
            self._last_recorded_at = self._taken_at if record else self._last_recorded_at
            counters.add("snapshots/failed")
            if counters["snapshots/failed"] == 1:
                self._controller.log.error("no snapshot of the run can be made", exc_info=error)
            return
        self._number += 1 + secrets.randbelow(LARGEST_STEP)
        self._taken_at = self._now()
        counters.add("snapshots/taken")
        counters.update({"snapshots/bytes": len(self._newest), "snapshots/take_s": self._taken_at - began})
        self._viewers.wake()
        if record:
            self._last_recorded_at = self._taken_at
            self._observation.record(snapshot.wall, self._newest)

    async def build(self) -> Snapshot:
        """Build a snapshot of the present state, and let other tasks run after every ACTORS_AT_ONCE actors.

        A resting replica, stopped for a time (state/reserve.py), has the condition "resting" in place of its own.
        """
        actor, run, past, config = self._controller, self._run, self._observation, self._controller.config
        now, wall, heartbeat_s = self._now(), actor.clock.wall(), config.supervision.heartbeat_s
        views = [past.view_self(now)]
        for view in view_actors(self._registry, run.expected, actor.name, now, heartbeat_s, actor.roster.gone):
            views.append(view)
            if len(views) % ACTORS_AT_ONCE == 0:
                await asyncio.sleep(0)
        resting = {each.name: each.reason for each in run.resting}
        views = [replace(view, condition="resting") if view.name in resting else view for view in views]
        outcome, lines = run.outcome, past.lines
        return Snapshot(
            wall=wall,
            run=RunView(
                name=actor.context.run_dir.name,
                run_id=actor.context.credentials.run_id,
                phase=run.phase,
                attempt=past.attempt,
                age_s=past.age_s(now),
                step=_step(lines, views),
                steps=config.learner.steps,
                version=max(view.version for view in views),
                reason=(f"{outcome.actor}: {outcome.reason}" if outcome.actor else outcome.reason) if outcome else "",
                exit_code=outcome.exit_code if outcome else 0,
                waiting_for=run.waiting_for,
                lost_hosts=sorted(run.lost.hosts),
                stalled=actor.stalled,
                staleness_max=config.staleness.max,
                groups_per_step=config.learner.groups_per_step,
                disk_free_bytes=past.disk_free,
                resting=resting,
            ),
            actors=sorted(views, key=lambda view: _sort_key(view.name)),
            train=list(lines.train),
            updates=list(lines.updates),
            evals=list(lines.evals.values()),
            events=list(past.events.kept),
        )

    @property
    def _record_due(self) -> float:
        return math.inf if self._record_s is None else self._last_recorded_at + self._record_s

    @property
    def _is_watched(self) -> bool:
        return self._now() - self._last_request_at < WATCHED_S


# --- views of actors ---


def view_actors(
    registry: Registry,
    expected: Iterable[str],
    own: str,
    now: float,
    heartbeat_s: float,
    gone: Collection[str] = (),
) -> Iterator[ActorView]:
    """Yield a view of each actor except ``own``, the controller, and except those that are gone.

    Times in the views are extended to ``now`` (monotonic, s).
    """
    for name in sorted({*expected, *registry.entries} - {own}, key=_sort_key):
        if name in gone:
            continue
        if (entry := registry.entries.get(name)) is None:
            yield ActorView(name=name, host="", condition="absent")
        else:
            yield view_actor(entry, _condition(entry, registry, heartbeat_s, now), now)


def view_actor(entry: Entry, condition: str, now: float) -> ActorView:
    """Make the view of an actor for a snapshot. ``condition`` says whether it is ready, silent, dead and so on."""
    record, beat = entry.record, entry.heartbeat or NO_HEARTBEAT
    # Seconds to add to the times of the last heartbeat; none if the actor may no longer be in that state.
    elapsed = 0.0 if condition in UNKNOWN or beat is NO_HEARTBEAT else max(0.0, now - entry.beaten)
    return ActorView(
        name=record.name,
        host=record.host,
        pid=record.pid,
        incarnation=record.incarnation,
        condition=condition,
        restarts=record.attempt,
        version=entry.version,
        heard_s=max(0.0, now - entry.heard),
        metrics=dict(entry.metrics),
        histograms=dict(entry.histograms),
        state=beat.state,
        awaiting=beat.awaiting,
        state_s=beat.state_s + elapsed,
        loop_lag_s=beat.loop_lag_s,
        loop_busy=beat.loop_busy,
        cpu=beat.cpu,
        rss_bytes=beat.rss_bytes,
        waits=[replace(wait, seconds=wait.seconds + elapsed) for wait in beat.awaits],
        resources=[_resource(heard, entry.since_s(heard), elapsed) for heard in entry.resources.values()],
        gpus=beat.gpus,
    )


def _resource(heard: HeardResource, since_s: float, elapsed: float) -> Resource:
    """A resource with its state's time extended: by ``since_s`` up to the last heartbeat, by ``elapsed`` up to now."""
    return replace(heard.record, state_s=heard.record.state_s + since_s + elapsed, since_s=since_s)


def _condition(entry: Entry, registry: Registry, heartbeat_s: float, now: float) -> str:
    """Find the condition of an actor for its view.

    It is the first that applies of: lost (with its host), dead, condemned (its node agent must kill it), silent, ready
    and starting.
    """
    if entry.lost:
        return "lost"
    if entry.ended:
        return "dead"
    if entry.condemned:
        return "condemned"
    if (beat := entry.heartbeat) is not None:
        # The actor may leave out ``left_out`` heartbeats after this one.
        longest_s = (SILENT_BEATS + beat.left_out) * heartbeat_s
        if registry.silence_of(entry, now) > longest_s:
            return "silent"
    # An agent has no setup, and no actor calls it: it is ready once it has an entry.
    return "ready" if entry.ready or role_of(entry.record.name) not in ROLES else "starting"


def _sort_key(name: str) -> tuple[str, int]:
    role, _, index = name.partition("/")
    return role, int(index) if index.isdigit() else 0


def _step(lines: RecentMetrics, actors: Iterable[ActorView]) -> int:
    """Find the last trained step: the larger one of the newest train line's and the learner's gauge.

    If another incarnation of the learner sent the line, only the gauge counts: it resumes from its checkpoint.
    """
    learner = next((actor for actor in actors if actor.name == "learner/0"), None)
    if learner is None or "learner/step" not in learner.metrics:
        return lines.step
    gauge = int(learner.metrics["learner/step"])
    return max(lines.step, gauge) if lines.learner == learner.incarnation else gauge

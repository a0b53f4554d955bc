"""Builds the snapshot of a run from the registry and the run's state machine. Pure: the caller brings the time.

The time of an actor's present state and waits grows after its last heartbeat, while the actor is heard. The seconds of
its resources by state end with the heartbeat, so no later snapshot takes any back. A snapshot holds only values that
an actor has sent, or that follow from its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Heartbeat
from asyncrl.roles import ROLES, role_of
from asyncrl.runtime.lifecycle.registry import Entry, HeardResource, Registry
from asyncrl.snapshot import (
    EVENTS,
    TRAIN_LINES,
    UPDATE_LINES,
    ActorView,
    Event,
    Resource,
    RunView,
    Snapshot,
    Wait,
)
from asyncrl.telemetry.metrics_line import is_voided

SILENT_BEATS = 4
"""Missed heartbeats after which an actor counts as silent."""
UNKNOWN = frozenset({"silent", "condemned", "dead", "lost"})
"""Conditions in which the present state of an actor is unknown."""
LONGEST_TEXT = 500
MOST_EVALS = 64
"""Most evaluations whose newest line is kept."""


@dataclass(slots=True)
class RecentMetrics:
    """The newest lines of metrics.jsonl."""

    learner: int = -1
    """Incarnation of the learner that sent the newest train line; -1 if unknown."""
    train: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=TRAIN_LINES))
    updates: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=UPDATE_LINES))
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, line: dict[str, Any], by: int = -1) -> None:
        """Add a line from an actor of incarnation ``by``, or from the recording."""
        match line.get("kind"):
            case "train":
                self.learner = by
                self._void(line)
                self.train.append(line)
            case "update":
                self.updates.append(line)
            case "eval":
                names = {key.split("/")[1] for key in line if key.startswith("eval/") and key.count("/") > 1}
                name = min(names, default="")
                if name in self.evals or len(self.evals) < MOST_EVALS:
                    self.evals[name] = line

    def _void(self, line: dict[str, Any]) -> None:
        """Remove lines of steps that a restarted learner trains again."""
        for lines in (self.train, self.updates):
            kept = [other for other in lines if not is_voided(other, line)]
            lines.clear()
            lines.extend(kept)
        self.evals = {name: other for name, other in self.evals.items() if not is_voided(other, line)}

    @property
    def all(self) -> tuple[Iterable[dict[str, Any]], ...]:
        """Lines by kind, the oldest first."""
        return self.train, self.updates, self.evals.values()

    @property
    def step(self) -> int:
        """Step of the newest line of training; 0 without one."""
        return int(self.train[-1].get("step", 0)) if self.train else 0


@dataclass(slots=True)
class RecentEvents:
    """The newest EVENTS events of a run."""

    kept: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    _number: int = 0
    _recalled: frozenset[tuple[str, float, str]] = frozenset()

    def add(self, wall: float, level: str, actor: str, text: str) -> None:
        """Add an event at ``wall`` (Unix, s)."""
        self._number += 1
        self.kept.append(Event(number=self._number, wall=wall, level=level, actor=actor, text=text[:LONGEST_TEXT]))

    def recall(self, earlier: Iterable[Event]) -> None:
        """Put the events of an earlier controller before the present ones."""
        since = list(self.kept)
        self.kept.clear()
        for event in (*earlier, *since):
            self.add(event.wall, event.level, event.actor, event.text)
        self._recalled = frozenset((event.actor, event.wall, event.text) for event in earlier)

    def is_recalled(self, wall: float, actor: str, text: str) -> bool:
        """Whether an earlier controller had this event."""
        return (actor, wall, text[:LONGEST_TEXT]) in self._recalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Values that do not change in a run."""

    name: str
    run_id: str
    attempt: int
    steps: int
    staleness_max: int
    groups_per_step: int
    heartbeat_s: float


def view_actors(
    constants: Constants,
    registry: Registry,
    expected: Iterable[str],
    own: str,
    now: float,
    is_gone: Callable[[str], bool] = lambda name: False,
) -> Iterator[ActorView]:
    """Views of all actors except this controller, one at a time, so the caller can run other tasks between them.

    Times are those ``now`` (monotonic, s). ``is_gone`` says of an actor or agent that it has left the run for good.
    """
    for name in sorted({*expected, *registry.entries} - {own}, key=_place):
        if is_gone(name):
            continue
        yield _view(name, registry.entries.get(name), registry, constants, now)


def view_self(record: ActorRecord, beat: Heartbeat, registry: Registry, constants: Constants, now: float) -> ActorView:
    """The view of the controller itself."""
    me = Entry(record, since=now, heard=now)
    me.merge(beat, now)
    return _view(record.name, me, registry, constants, now, condition="ready")


def build_snapshot(
    constants: Constants,
    run: RunStateMachine,
    lines: RecentMetrics,
    events: Iterable[Event],
    actors: Iterable[ActorView],
    *,
    stalled: str,
    age_s: float,
    disk_free_bytes: int | None,
    wall: float,
) -> Snapshot:
    """The snapshot of the run with these actors."""
    aside = {actor.name for actor in run.aside}
    views = [msgspec.structs.replace(view, condition="aside") if view.name in aside else view for view in actors]
    actors = sorted(views, key=lambda actor: _place(actor.name))
    outcome = run.outcome
    return Snapshot(
        wall=wall,
        run=RunView(
            name=constants.name,
            run_id=constants.run_id,
            phase=run.phase,
            attempt=constants.attempt,
            age_s=age_s,
            step=_step(lines, actors),
            steps=constants.steps,
            version=max((actor.version for actor in actors), default=-1),
            reason=(f"{outcome.actor}: {outcome.reason}" if outcome.actor else outcome.reason) if outcome else "",
            exit_code=outcome.exit_code if outcome else 0,
            waiting_for=run.waiting_for,
            lost_hosts=sorted(run.lost_hosts),
            stalled=stalled,
            staleness_max=constants.staleness_max,
            groups_per_step=constants.groups_per_step,
            disk_free_bytes=disk_free_bytes,
            aside={actor.name: actor.reason for actor in run.aside},
        ),
        actors=actors,
        train=list(lines.train),
        updates=list(lines.updates),
        evals=list(lines.evals.values()),
        events=list(events),
    )


def _step(lines: RecentMetrics, actors: Iterable[ActorView]) -> int:
    """The last trained step: by the newest line or by the learner's gauge. If the line is of another incarnation, only
    the gauge counts: a restarted learner resumes from its checkpoint."""
    learner = next((actor for actor in actors if actor.name == "learner/0"), None)
    if learner is None or "learner/step" not in learner.metrics:
        return lines.step
    said = int(learner.metrics["learner/step"])
    return max(lines.step, said) if lines.learner == learner.incarnation else said


def _view(
    name: str, entry: Entry | None, registry: Registry, constants: Constants, now: float, condition: str = ""
) -> ActorView:
    if entry is None:
        return ActorView(name=name, host="", condition="absent")
    record, beat = entry.record, entry.heartbeat
    condition = condition or _condition(entry, registry, constants, now)
    known: dict[str, Any] = {
        "name": name,
        "host": record.host,
        "pid": record.pid,
        "incarnation": record.incarnation,
        "condition": condition,
        "restarts": record.attempt,
        "version": entry.version,
        "heard_s": max(0.0, now - entry.heard),
        "metrics": dict(entry.figures),
        "histograms": dict(entry.histograms),
    }
    if beat is None:
        return ActorView(**known)
    # The time of a state does not grow if the actor has ended or is unreachable.
    more = 0.0 if condition in UNKNOWN else max(0.0, now - entry.beaten)
    return ActorView(
        **known,
        state=beat.state,
        awaiting=beat.awaiting,
        state_s=beat.state_s + more,
        loop_lag_s=beat.loop_lag_s,
        loop_busy=beat.loop_busy,
        cpu=beat.cpu,
        rss_bytes=beat.rss_bytes,
        waits=[Wait(whom=w.whom, what=w.what, seconds=w.seconds + more, idle=w.idle) for w in beat.awaits],
        resources=[_resource(heard, entry.since_s(heard), more) for heard in entry.resources.values()],
        gpus=beat.gpus,
    )


def _resource(heard: HeardResource, since_s: float, more: float) -> Resource:
    """A resource. ``since_s`` passed between its record and the last heartbeat, ``more`` after that."""
    said = heard.record
    return Resource(
        name=said.name,
        state=said.state,
        awaiting=said.awaiting,
        state_s=said.state_s + since_s + more,
        seconds=said.seconds,
        since_s=since_s,
    )


def _condition(entry: Entry, registry: Registry, constants: Constants, now: float) -> str:
    if entry.lost:
        return "lost"
    if entry.ended:
        return "dead"
    if entry.condemned:
        return "condemned"
    if (beat := entry.heartbeat) is not None:
        longest_s = (SILENT_BEATS + beat.left_out) * constants.heartbeat_s
        if registry.silence_of(entry, now) > longest_s:
            return "silent"
    # No actor calls an agent: it is ready once it is registered.
    return "ready" if entry.ready or role_of(entry.record.name) not in ROLES else "starting"


def _place(name: str) -> tuple[str, int]:
    role, _, index = name.partition("/")
    return role, int(index) if index.isdigit() else 0

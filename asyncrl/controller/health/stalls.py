"""Detects that a run has stalled although its actors are alive, and describes which actor waits for which.

A run *moves* when a group is trained, a warm step is taken, a version is published or loaded, or a token is sampled. If
none of this happens for ``watchdog.stall_s``, there is a report. Some states have a *budget*, a time that they may
normally take (``watchdog.budgets_s``). An actor that is within the budget of its state delays the report. When such a
state ends in time, the clock starts again. A restart is no movement, but a new actor is. An actor that was restarted
twice since the run last moved has no budgets: with budgets, repeated restarts would hide the stall.

A report names the waits of all actors and chooses no culprit: a stall restarts no actor. With ``watchdog.policy =
"stop"`` the first report ends the run, with ``"report"`` none does. By default the run ends when nothing has moved for
``stall_s`` + ``deadlines_s``, the deadlines of all kinds of work together. No work that takes longer can still succeed.

Invariant: a stall is reported once, and again after pauses that double for as long as it lasts. There is no report
while the run starts, is preempted, drains, or has nothing to do. Time in which this process itself did not run does not
count. Pure: the caller passes the time (monotonic, s).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.config.operation import WatchdogConfig
from asyncrl.core.formatting import name_some
from asyncrl.core.roles import ROLES, role_of
from asyncrl.messages.actors import RunPhase
from asyncrl.messages.monitor import Wait

LEARNER = "learner/0"
CONTROLLER = "controller"
SILENT_SHARE = 0.5
"""Share of stall_s after which an actor counts as silent, but after no less than three heartbeat intervals."""
IDLE_STATES = frozenset({"ready", "waiting", "following", "idle", "asleep", "done"})
"""States in which an actor does no work of its own."""
FINISHED_STATES = frozenset({"done", "ready"})
"""States in which the learner has nothing to train."""
SECONDS = "N s"
"""Placeholder for the seconds in a clause."""
MOST_CLAUSES = 8
"""Largest number of clauses in a report."""
MOST_STACKS = 4
"""Largest number of actors whose stacks are taken for a report, and of actors that a clause names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """An actor as the controller sees it now. Times are seconds up to now."""

    name: str
    incarnation: int
    state: str
    state_s: float = 0.0
    waits: Sequence[Wait] = ()
    silent_s: float = 0.0
    """Seconds since its last message, without time in which the controller did not listen."""
    ended: bool = False
    """Whether the actor's process has ended or is condemned, and no successor is known."""
    version: int = -1
    """Newest policy version that the actor knows. A restarted one loads an old version again, which is no movement."""
    progress: tuple[float, ...] = ()
    """Counters that only grow within an incarnation, always the same ones in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """A report on a stall."""

    number: int
    """Place among all reports of this controller, from 1."""
    since: float
    """Monotonic time (s) at which the run last moved."""
    text: str
    stacks: Sequence[ActorStatus]
    """At most MOST_STACKS actors that are silent or wait for no other actor. Their stacks show what they do."""
    ends_run: bool


@dataclass(frozen=True, slots=True)
class _Clause:
    """A clause of a report, on actors of one role in the same situation. Clauses are sorted by rank and seconds."""

    rank: int
    """Place in the report: -1 for the learner, else the rank of the situation, from 0."""
    seconds: float
    """Longest time of any of its actors in the situation."""
    text: str
    actors: list[ActorStatus]


def deadlines_of(config: Config) -> float:
    """Sum of the deadlines (s) of single pieces of work: a call of the engine, an episode, a reward, and so on."""
    return (
        config.rollout.engine_timeout_s
        + config.episode.timeout_s
        + config.reward.timeout_s
        + config.weights.deadline_s
        + config.learner.collective_timeout_s
    )


@dataclass(slots=True)
class StallDetector:
    """Detects the stalls of one run. ``report`` is the newest report of the present stall; None while the run moves."""

    config: WatchdogConfig
    interval_s: float
    """Usual time between two calls of ``look``."""
    deadlines_s: float = math.inf
    """Sum of the deadlines of single pieces of work, from ``deadlines_of``."""
    report: StallReport | None = None
    _reports: int = 0
    _moved_at: float | None = None
    """Start of the clock: when the run last moved or was idle, or a state ended in its budget; None before it runs."""
    _next_report: float = 0.0
    _pause: float = 0.0
    """Pause before the next report of this stall (s)."""
    _best: dict[str, tuple[int, int, tuple[float, ...]]] = field(default_factory=dict)
    """By actor: its incarnation, its largest version, and the largest values of this incarnation's counters."""
    _restarts: Counter[str] = field(default_factory=Counter)
    """Number of restarts of each actor since the run last moved."""
    _within_budget: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Incarnation and state of each actor that was within a budget at the last call of ``look``."""

    def look(self, actors: Mapping[str, ActorStatus], phase: RunPhase, now: float, listening_since: float) -> bool:
        """Update ``report`` from the status of all actors; called every few seconds. Returns whether it has changed.

        ``listening_since`` is the time since which this process has listened without a gap (s).
        """
        report_before = self.report
        moved, in_time = self._note_progress(actors), self._update_budgets(actors)
        if phase != "running" or (self._moved_at is None and LEARNER not in actors):
            self._moved_at, self.report = None, None
        elif self._moved_at is None or self._moved_at < listening_since or moved or _is_idle(actors):
            self._moved_at, self.report = now, None
            self._restarts.clear()
        elif in_time:
            # No movement, so the restarts stay counted.
            self._moved_at, self.report = now, None
        elif LEARNER in actors:
            # Without heartbeats of the learner there is no report: it starts, or is handled as a silent actor.
            self._report_if_due(actors, now - self._moved_at, now)
        return self.report is not report_before

    def _report_if_due(self, actors: Mapping[str, ActorStatus], lasted: float, now: float) -> None:
        """Make a report if one is due or the run must end, unless an actor that is heard is within its budget.

        ``lasted`` is the time without movement (s). After a report that ends the run there is no further one.
        """
        if self.report is None:
            self._pause, self._next_report = self.config.stall_s, now - lasted + self.config.stall_s
        elif self.report.ends_run:
            return
        ends_run = lasted >= self._ends_after_s
        if (now < self._next_report and not ends_run) or self._has_budget(actors):
            return
        self._pause *= 2
        self._next_report = now + self._pause
        self._reports += 1
        waits, stacks = describe_waits(actors, self._silent_after_s)
        text = f"nothing has moved for {lasted:.0f} s (no trained group, no version, no token): {waits}"
        self.report = StallReport(number=self._reports, since=now - lasted, text=text, stacks=stacks, ends_run=ends_run)

    @property
    def consequence(self) -> str:
        """A sentence for the user: when the present stall will end the run, if ever."""
        if self.config.policy == "report":
            return "The run stays as it is (watchdog.policy = report)"
        return f"If this lasts {self._ends_after_s:.0f} s, the run ends (watchdog.policy)"

    @property
    def _ends_after_s(self) -> float:
        """Time without movement after which a report ends the run (s); infinite if none does."""
        if self.config.policy == "report":
            return math.inf
        return self.config.stall_s + (0.0 if self.config.policy == "stop" else self.deadlines_s)

    def _note_progress(self, actors: Mapping[str, ActorStatus]) -> bool:
        """Store versions and counters of all actors, and count restarts. Returns whether the run has moved.

        The first status of an actor counts as movement.
        """
        moved = False
        for name, actor in actors.items():
            version, progress = actor.version, actor.progress
            if (known := self._best.get(name)) is None:
                moved = True
            else:
                incarnation, best_version, best_progress = known
                moved |= version > best_version
                version = max(version, best_version)
                if incarnation != actor.incarnation:
                    self._restarts[name] += 1
                else:
                    moved |= any(new > old for new, old in zip(progress, best_progress, strict=True))
                    progress = tuple(max(pair) for pair in zip(progress, best_progress, strict=True))
            self._best[name] = (actor.incarnation, version, progress)
        return moved

    def _update_budgets(self, actors: Mapping[str, ActorStatus]) -> bool:
        """Store which actors are within a budget.

        Returns whether an actor that was within its budget at the last look has since left that state. An actor that
        has ended or was restarted does not count.
        """
        within_budget = {}
        for name, actor in actors.items():
            if self._budget_left_s(actor) > 0.0 and not actor.ended:
                within_budget[name] = (actor.incarnation, actor.state)
        in_time = False
        for name, (incarnation, state) in self._within_budget.items():
            present = actors.get(name)
            in_time |= (
                present is not None
                and not present.ended
                and present.incarnation == incarnation
                and present.state != state
            )
        self._within_budget = within_budget
        return in_time

    def _budget_left_s(self, actor: ActorStatus) -> float:
        """Seconds that are left of an actor's budget for its state; 0 or less without any."""
        if self._restarts[actor.name] > 1:
            return 0.0
        return self.config.budgets_s.get(actor.state, 0.0) - actor.state_s

    def _has_budget(self, actors: Mapping[str, ActorStatus]) -> bool:
        """Whether any actor that is alive and not silent is within the budget of its state."""
        living = [actor for actor in actors.values() if not actor.ended and actor.silent_s < self._silent_after_s]
        return any(self._budget_left_s(actor) > 0.0 for actor in living)

    @property
    def _silent_after_s(self) -> float:
        """Time without a message after which an actor counts as silent (s)."""
        return max(SILENT_SHARE * self.config.stall_s, 3 * self.interval_s)


def describe_waits(actors: Mapping[str, ActorStatus], silent_after_s: float) -> tuple[str, list[ActorStatus]]:
    """Return the clauses of a report as one text, and the actors for ``StallReport.stacks``.

    A clause says what an actor waits for or does. Actors of one role in the same situation share a clause. The learner
    comes first, then silent and dead actors, then waiting, busy and idle ones. At most MOST_CLAUSES clauses are shown.
    """
    # By role, rank of the situation and clause. The learner's rank 0 has the role "", so that it has its own clause.
    groups: dict[tuple[str, int, str], list[tuple[float, ActorStatus]]] = {}
    for name in sorted(actors):
        actor = actors[name]
        rank, words, seconds = _situation(actor, silent_after_s)
        groups.setdefault(("" if name == LEARNER else role_of(name), rank, words), []).append((seconds, actor))
    clauses = []
    for (role, rank, words), members in groups.items():
        seconds = max(each for each, _ in members)
        names = name_some([actor.name for _, actor in members], MOST_STACKS)
        text = f"{names} {words.replace(SECONDS, f'{seconds:.0f} s', 1)}"
        clauses.append(_Clause(rank if role else -1, seconds, text, [actor for _, actor in members]))
    clauses.sort(key=lambda clause: (clause.rank, -clause.seconds))
    more = f"; and {len(clauses) - MOST_CLAUSES} more" if len(clauses) > MOST_CLAUSES else ""
    shown = [actor for clause in clauses[:MOST_CLAUSES] for actor in clause.actors]
    stacks = [
        actor
        for actor in shown
        if not actor.ended and (actor.silent_s >= silent_after_s or not _waits_for_others(actor, actors))
    ]
    return "; ".join(clause.text for clause in clauses[:MOST_CLAUSES]) + more, stacks[:MOST_STACKS]


def describe_silence(actor: ActorStatus) -> str:
    """Describe an actor that is killed for its silence."""
    activity = f"it was {actor.state}"
    if blocking := [wait for wait in actor.waits if not wait.idle]:
        oldest = max(blocking, key=lambda wait: wait.seconds)
        activity += f" and waited on {oldest.whom} for {oldest.what}"
    return f"{actor.name} has not been heard of for {actor.silent_s:.0f} s ({activity})"


def _situation(actor: ActorStatus, silent_after_s: float) -> tuple[int, str, float]:
    """Return the rank of an actor's situation, its clause with SECONDS as a placeholder, and the seconds."""
    if actor.ended:
        return 0, "has ended or is to be killed, and is not back", actor.silent_s
    if actor.silent_s >= silent_after_s:
        return 0, f"has not been heard of for {SECONDS} (it was {actor.state})", actor.silent_s
    if blocking := [wait for wait in actor.waits if not wait.idle]:
        oldest = max(blocking, key=lambda wait: wait.seconds)
        return 1, _wait_clause(oldest), oldest.seconds
    if actor.state not in IDLE_STATES:
        return 2, f"is {actor.state} for {SECONDS}", actor.state_s
    if idle := [wait for wait in actor.waits if role_of(wait.whom) != CONTROLLER]:
        oldest = max(idle, key=lambda wait: wait.seconds)
        return 3, f"is idle and {_wait_clause(oldest)}", oldest.seconds
    return 3, f"is {actor.state} for {SECONDS} and waits for nothing", actor.state_s


def _wait_clause(wait: Wait) -> str:
    """Write the clause of a wait: on another actor, for a role, or on a part of the actor itself."""
    if "/" in wait.whom:
        return f"waits {SECONDS} on {wait.whom} for {wait.what}"
    # A role stands for any of its actors; any other word is a part of the actor itself.
    return (
        f"waits {SECONDS} for {wait.what}"
        if wait.whom in ROLES
        else f"waits {SECONDS} on its {wait.whom} for {wait.what}"
    )


def _waits_for_others(actor: ActorStatus, actors: Mapping[str, ActorStatus]) -> bool:
    """Whether a wait that is not idle is on another actor or on a role, and not on a part of the actor itself."""
    return any(not wait.idle and (wait.whom in actors or wait.whom in ROLES) for wait in actor.waits)


def _is_idle(actors: Mapping[str, ActorStatus]) -> bool:
    """Whether the learner has nothing to train, and every actor is in an idle state with idle waits only."""
    return (
        LEARNER in actors
        and actors[LEARNER].state in FINISHED_STATES
        and all(actor.state in IDLE_STATES and all(wait.idle for wait in actor.waits) for actor in actors.values())
    )

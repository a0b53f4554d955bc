"""Decides that a run has stalled though its actors live, reports who holds it up, and says what is done about it.

A run moves when a group is trained, a warm step is taken, a version is published or taken over, or a token is sampled.
When none of this has happened for ``watchdog.stall_s`` there is a report, which names the culprit and the chain of
waits that leads there. An actor in a state that has a budget of its own extends the time while it is within that
budget, and the clock starts again when it leaves such a state in time, or when an actor starts anew.

Under the policy ``restart`` the culprit is killed, unless it may still be at work: one that beats has the time that a
single piece of its role's work may take (``patience_s``). Restarts that bring no step of training are counted, and
after ``max_restarts`` of them the run ends. Each report tells what is done.

Invariants: one report for a stall, repeated after twice the time before while it lasts, each with what is seen then;
none while the run starts, drains, or has nothing to do; a report holds until the run moves or its culprit is another
process. Time in which this process itself did not look counts as nothing. Pure: the caller brings the time
(monotonic, s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from asyncrl.config import Config
from asyncrl.config.operation import ActorState, WatchdogConfig
from asyncrl.controller.health.blame import FIRST, LEISURE, SeenActor, find_culprit
from asyncrl.messages.actors import RunPhase
from asyncrl.roles import role_of

LONGEST_GAP = 0.25
"""Share of the time to a stall after which a gap between two looks is time in which nobody could be heard."""
SILENT_SHARE = 0.5
"""Share of the time to a stall: an actor that was silent for longer is suspect of itself."""
FINISHED = frozenset({"done", "ready"})
"""States of the learner in which it has nothing to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """The watchdog's words on a stall."""

    number: int
    name: str
    incarnation: int
    since: float
    """Time at which the run last moved."""
    text: str
    action: Literal["none", "restart", "stop"] = "none"
    """The consequence."""


def patience_of(config: Config) -> dict[str, float]:
    """Longest time that a single piece of work may take, by role."""
    return {
        "rollouter": config.rollout.engine_timeout_s,
        "episodes": config.episode.timeout_s,
        "reward": config.reward.timeout_s,
        "parameter_server": config.weights.deadline_s,
        "learner": config.learner.collective_timeout_s,
    }


@dataclass(slots=True)
class Watchdog:
    """Watches one run. ``report`` is the one that holds."""

    config: WatchdogConfig
    look_s: float
    """Time between two looks, about."""
    patience_s: Mapping[str, float] = field(default_factory=dict)
    """Patience by role, as ``patience_of`` has it."""
    max_restarts: int = 3
    """Culprits that are started again before the run ends, if none of it brings a step."""
    report: StallReport | None = None
    _reports: int = 0
    _restarts: int = 0
    """Culprits that were started again since the last step."""
    _moved: float | None = None
    """Time at which the run last moved, or was excused by what it did."""
    _looked: float = 0.0
    _again: float = 0.0
    """Time at which a stall that lasts is reported next."""
    _interval: float = 0.0
    _best: dict[str, tuple[int, tuple[float, ...]]] = field(default_factory=dict)
    """Incarnation and figures of each actor, the largest seen."""
    _budgeted: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Incarnation and state of those that were within a budget at the last look."""

    def look(self, actors: Mapping[str, SeenActor], phase: RunPhase, now: float) -> bool:
        """Look how things are, every few seconds. Whether ``report`` is another one than before."""
        before = self.report
        gap = now - self._looked > max(LONGEST_GAP * self.config.stall_s, 3 * self.look_s)
        self._looked = now
        moved = self._take_in(actors)
        if phase != "running" or FIRST not in actors:
            self._moved, self.report = None, None
        elif self._moved is None or gap or moved or _nothing_to_do(actors):
            self._moved, self.report = now, None
        else:
            self._judge(actors, now)
        return self.report is not before

    def _judge(self, actors: Mapping[str, SeenActor], now: float) -> None:
        assert self._moved is not None
        if self.report is None:
            until = self._moved + self.config.stall_s
            self._interval = self.config.stall_s
        else:
            until = self._again
        if now < until or self._is_excused(actors):
            return
        self._interval *= 2
        self._again = now + self._interval
        self._reports += 1
        blame = find_culprit(actors, self._silent_after_s)
        action, done = self._decide(actors[blame.name], now - self._moved)
        lasted = f"{now - self._moved:.0f} s (no trained group, no version, no token)"
        self.report = StallReport(
            number=self._reports,
            name=blame.name,
            incarnation=blame.incarnation,
            since=self._moved,
            text=f"nothing has moved for {lasted}, because of {blame.name}: {blame.chain}; {done}",
            action=action,
        )

    def _decide(self, culprit: SeenActor, lasted: float) -> tuple[Literal["none", "restart", "stop"], str]:
        """Say what is done about a culprit."""
        policy, name = self.config.policy, culprit.name
        if policy == "report":
            return "none", f"nothing is done about it (watchdog.policy = {policy})"
        if policy == "stop":
            return "stop", f"the run ends (watchdog.policy = {policy})"
        if culprit.ended:
            return "none", f"{name} is to be started again by its agent"
        patience = self.patience_s.get(role_of(name), 0.0)
        if culprit.silent_s < self._silent_after_s and lasted < patience:
            return "none", f"{name} is left alone, as its work may take {patience:g} s"
        if self._restarts >= self.max_restarts:
            return "stop", f"the run ends, as {self._restarts} restarts of whoever held it up have not brought a step"
        self._restarts += 1
        return "restart", f"{name} is killed and started again (watchdog.policy = {policy})"

    def _take_in(self, actors: Mapping[str, SeenActor]) -> bool:
        """Whether anything has moved."""
        moved = False
        budgeted = {}
        for name, actor in actors.items():
            known = self._best.get(name)
            if known is None or known[0] != actor.incarnation:
                moved = True
                self._best[name] = (actor.incarnation, actor.figures)
            elif any(new > old for new, old in zip(actor.figures, known[1], strict=True)):
                moved = True
                if name == FIRST:
                    self._restarts = 0
                best = tuple(max(pair) for pair in zip(actor.figures, known[1], strict=True))
                self._best[name] = (actor.incarnation, best)
            if self._left_s(actor) > 0.0 and not actor.ended:
                budgeted[name] = (actor.incarnation, actor.state)
        for name, was in self._budgeted.items():
            left = actors.get(name)
            moved |= left is not None and not left.ended and (left.incarnation, left.state) != was
        self._budgeted = budgeted
        return moved

    def _left_s(self, actor: SeenActor) -> float:
        """Seconds left of the budget of the state that an actor is in."""
        return self.config.budgets_s.get(cast(ActorState, actor.state), 0.0) - actor.state_s

    def _is_excused(self, actors: Mapping[str, SeenActor]) -> bool:
        living = [actor for actor in actors.values() if not actor.ended and actor.silent_s < self._silent_after_s]
        return any(self._left_s(actor) > 0.0 for actor in living)

    @property
    def _silent_after_s(self) -> float:
        return max(SILENT_SHARE * self.config.stall_s, 3 * self.look_s)


def _nothing_to_do(actors: Mapping[str, SeenActor]) -> bool:
    """The learner has nothing to train, and nobody works or waits for anybody in earnest."""
    learner = actors[FIRST]
    return learner.state in FINISHED and all(
        actor.state in LEISURE and all(wait.idle for wait in actor.waits) for actor in actors.values()
    )

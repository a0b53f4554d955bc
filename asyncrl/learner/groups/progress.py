"""The numbers that the parts of the learner's loop share, and the steps that follow from them.

    Progress     steps trained, versions published, and whether the run ends
    NextStep     a step to come, and the version under which it is planned
    PlanInputs   everything that the plan of a step depends on

Training counts steps, VersionSchedule counts versions, the actor sets ``preempted``; all other parts only read. A
change that others wait for is followed by ``news.announce``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.learner.groups.buffer import GroupBuffer
from asyncrl.messages.groups import Group


class News:
    """A signal to several waiters. Each has its own event and clears it itself."""

    def __init__(self) -> None:
        self._events: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """A new event that every announcement sets."""
        self._events.append(event := asyncio.Event())
        return event

    def announce(self) -> None:
        """Wake all waiters: groups or prompts have come, a teacher has scored, a version was lost, or the run ends."""
        for event in self._events:
            event.set()


@dataclass(slots=True)
class Progress:
    """Progress of the training of a run."""

    step: int = 0
    """Steps trained so far."""
    version: int = -1
    """The newest version; -1 before the first."""
    trained_at_version: int = 0
    """Groups that were trained when that version was published."""
    unpublished: int = 0
    """Steps trained since that version."""
    preempted: bool = False
    """Whether the run is preempted: it stops at the next version boundary."""
    finished: bool = False
    """Whether the last step was trained."""
    news: News = field(default_factory=News)

    @property
    def next_step(self) -> NextStep:
        """The step that comes next, if it began now."""
        return NextStep(self.step + 1, self.version, self.unpublished)


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step to come."""

    step: int
    """Number of the step, counted from 1."""
    version: int
    """The newest version when the step begins."""
    unpublished: int
    """Steps trained since that version."""

    def after(self, steps_per_version: int, next_version: int) -> NextStep:
        """The step after this one, if version ``next_version`` can be published when it is due."""
        trained = self.unpublished + 1
        if trained < steps_per_version:
            return NextStep(self.step + 1, self.version, trained)
        return NextStep(self.step + 1, next_version, 0)

    def groups_wanted(self, config: Config) -> int:
        """Groups that must be in the buffer before the step begins."""
        learner = config.learner
        if config.staleness.max:
            return learner.groups_per_step
        # All groups of the version: otherwise the choice for a step would depend on the order of arrival. While a
        # version is overdue, more steps may be unpublished than make one; the next step still needs its own groups.
        return learner.groups_per_step * max(1, learner.steps_per_version - self.unpublished)

    def inputs(self, buffer: GroupBuffer, config: Config) -> PlanInputs | None:
        """The inputs of the step's plan if it began now; None while there are too few groups."""
        if len(buffer) < self.groups_wanted(config):
            return None
        return self.inputs_of(buffer.look_up(buffer.oldest(config.learner.groups_per_step)))

    def inputs_of(self, groups: Sequence[Group]) -> PlanInputs:
        """The inputs of the step's plan if it trains these groups."""
        return PlanInputs(self.step, self.version, self.unpublished == 0, tuple(groups))


@dataclass(frozen=True, slots=True, eq=False)
class PlanInputs:
    """Everything that the plan of a step depends on."""

    step: int
    version: int
    fresh: bool
    """Whether no step was trained since the version."""
    groups: tuple[Group, ...]
    """Groups in the order in which they are trained."""

    def make_same_plan(self, other: PlanInputs) -> bool:
        """Whether both give the same plan. A group that came again under the uid of another is not the same."""
        return (
            (self.step, self.version, self.fresh) == (other.step, other.version, other.fresh)
            and len(self.groups) == len(other.groups)
            and all(ours is theirs for ours, theirs in zip(self.groups, other.groups, strict=True))
        )

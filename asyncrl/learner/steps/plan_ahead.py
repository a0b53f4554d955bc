"""The plan of the next step, made and sent to the ranks while the present one is trained.

    Outlook   the step that comes next and its version, unless that version cannot be made
    Basis     all that a plan is made of: the step, its version, its groups

The groups of a step are chosen when it begins, so an early plan is a guess: of the groups that would be chosen
now. It is made anew when older ones have come meanwhile, but takes no more than half of the time.

It keeps: an early plan is used only where it was made of the basis with which the step begins, the very same groups
under the same version. A plan is a function of these, so a step is the same as without. One that no step can take any
more is not sent, or void where it was (sent_ahead.py). Nothing of it is durable.

Fails with nothing of its own: an error of an early plan is raised to the step that takes it. If no step does, its
groups are planned again in another, and fail there; ranks that could not be sent anything fail the next step itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.learner.algorithm.plan.batch import StepPlan
from asyncrl.learner.exchange.sent_ahead import Sending, Sendings
from asyncrl.learner.groups.buffer import GroupBuffer
from asyncrl.messages.groups import Group
from asyncrl.telemetry.metrics import Figures


@dataclass(frozen=True, slots=True)
class Outlook:
    """A step to come."""

    step: int
    """Number of the step, counted from 1."""
    version: int
    """The newest version when the step begins."""
    unpublished: int
    """Steps trained since that version."""

    def after(self, steps_per_version: int, next_version: int) -> Outlook:
        """The step behind it, if ``next_version`` is the number of the next version and that can be made."""
        trained = self.unpublished + 1
        if trained < steps_per_version:
            return Outlook(self.step + 1, self.version, trained)
        return Outlook(self.step + 1, next_version, 0)

    def basis(self, groups: Sequence[Group]) -> Basis:
        """Basis of the step's plan if it trains these groups."""
        return Basis(self.step, self.version, self.unpublished == 0, tuple(groups))


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """All that the plan of a step is made of."""

    step: int
    version: int
    fresh: bool
    """Whether no step was trained since the version."""
    groups: tuple[Group, ...]
    """Groups in the order in which they are trained."""

    def is_that_of(self, other: Basis) -> bool:
        """Whether the same plan is made of both. A group that came anew under the uid of another is not the same."""
        return (
            (self.step, self.version, self.fresh) == (other.step, other.version, other.fresh)
            and len(self.groups) == len(other.groups)
            and all(ours is theirs for ours, theirs in zip(self.groups, other.groups, strict=True))
        )


def groups_wanted(step: Outlook, config: Config) -> int:
    """Groups that have to be here before the step begins."""
    learner = config.learner
    if config.staleness.max:
        return learner.groups_per_step
    # All of a version's, or the choice of a step's groups would be a matter of their arrival.
    # While a version is owed, more steps may be unpublished than make one; the next one needs its groups all the same.
    return learner.groups_per_step * max(1, learner.steps_per_version - step.unpublished)


def oldest_groups(buffer: GroupBuffer, step: Outlook, config: Config) -> list[str]:
    """Uids of the step's groups, of those that are here; none where these are too few."""
    return buffer.oldest(config.learner.groups_per_step) if len(buffer) >= groups_wanted(step, config) else []


@dataclass(frozen=True, slots=True)
class _Early:
    basis: Basis
    plan: asyncio.Future[StepPlan]


class PlanAhead:
    """Early plans. ``expected`` is the basis of the next step as far as is known, None where that is too little;
    ``plan`` makes a plan of it and ``send`` takes it to the ranks, on a thread of their own.
    """

    def __init__(
        self,
        expected: Callable[[], Basis | None],
        plan: Callable[[Basis], StepPlan],
        send: Callable[[StepPlan, Sending], None],
        counters: Figures,
    ) -> None:
        self._expected, self._plan, self._send, self._counters = expected, plan, send, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._changed = asyncio.Event()
        self._sendings = Sendings()
        self._early: _Early | None = None

    def look_again(self) -> None:
        """Note that the expected basis may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Plan each expected basis, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._changed.wait()
            self._changed.clear()
            began, basis = clock(), self._expected()
            if basis is not None and not (self._early is not None and self._early.basis.is_that_of(basis)):
                self._discard()
                # The plan is not awaited itself, since its error is that of the step which takes it.
                await asyncio.wait([self._begin(basis)])
            await asyncio.sleep(clock() - began)

    async def take(self, basis: Basis) -> tuple[StepPlan, int] | None:
        """The plan of the step that begins with this basis, and its number on the ranks, if it was made early.

        Raises the error of making or sending it.
        """
        if self._early is None or not self._early.basis.is_that_of(basis):
            self._discard()
            return None
        # It is taken before the wait, in which ``run`` may look for another basis and discard what it finds here.
        early, self._early = self._early, None
        number = self._sendings.take()
        self._counters.add("learner/plans_ahead")
        return await early.plan, number

    def close(self) -> None:
        """Plan nothing more; ``run`` has ended."""
        if self._early is not None:
            self._early.plan.cancel()
        self._sendings.withdraw()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, basis: Basis) -> asyncio.Future[StepPlan]:
        plan = asyncio.get_running_loop().run_in_executor(self._thread, self._make, basis, self._sendings.begin())
        # A plan that nobody takes fails nothing.
        plan.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._early = _Early(basis, plan)
        return plan

    def _make(self, basis: Basis, sending: Sending) -> StepPlan:
        plan = self._plan(basis)
        # A step without a token is none.
        if plan.sequences and not self._sendings.is_void(sending.number):
            self._send(plan, sending)
        return plan

    def _discard(self) -> None:
        if self._early is not None:
            self._counters.add("learner/plans_discarded")
            self._sendings.withdraw()
            self._early = None

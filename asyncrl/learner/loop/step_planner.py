"""Waits for the groups of each step and plans it.

The wait ends when all groups of a step are in the buffer, and scored if a teacher on a server scores them. It also ends
when the run is preempted. Meanwhile an overdue version is tried again, at times that no other event postpones. In time
slices (gpu/slices.py) the engines get the GPUs during the wait, once the parameter server has the newest version or
``weights.deadline_s`` is over.

A step is planned when it begins, or early, before that. Its groups are chosen when it begins. So an early plan is a
guess: it takes the groups that would be chosen now, and is made again if older groups come. Early planning takes at
most half of the time.

Invariant: an early plan is used only if the step begins with the very same groups under the same version. A plan is a
function of groups and version, so every step is the same as without early plans. If a model has to score the groups
first, nothing is planned early.

An error of an early plan is raised in the step that uses the plan. If no step uses the plan, its groups are planned
again later, and fail there. Fails with CannotLearn when too many groups cannot be trained, and with ActorFailed when no
version can be published for too long. Otherwise fails as build_step, scoring.py and the backend say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.config.operation import LAST_GROUPS_SHARE
from asyncrl.core.errors import CannotLearn
from asyncrl.core.threads import run_on
from asyncrl.learner.algorithm.advantages import Advantage, Penalties
from asyncrl.learner.algorithm.batch import GroupScores, StepPlan, build_step
from asyncrl.learner.algorithm.scoring import build_scoring, by_group, kl_penalties
from asyncrl.learner.algorithm.supervised_steps import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import GroupBuffer, Intake
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.publishing.versions import Versions
from asyncrl.messages.groups import Group
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices


@dataclass(frozen=True, slots=True)
class NextStep:
    """A future step: its number, and the version under which it will begin."""

    step: int
    """Number of the step, counted from 1."""
    version: int
    """The newest version when the step begins."""
    unpublished: int
    """Steps trained since ``version`` was published."""

    @classmethod
    def of(cls, progress: TrainingProgress) -> NextStep:
        """The step that would begin now."""
        return cls(progress.step + 1, progress.version, progress.unpublished)

    def after(self, steps_per_version: int, next_version: int) -> NextStep:
        """The step after this one, if ``next_version`` is published as soon as it is due."""
        trained = self.unpublished + 1
        if trained < steps_per_version:
            return NextStep(self.step + 1, self.version, trained)
        return NextStep(self.step + 1, next_version, 0)

    def groups_wanted(self, config: Config) -> int:
        """Number of groups that must be in the buffer before the step begins."""
        learner = config.learner
        if config.staleness.max:
            return learner.groups_per_step
        # On policy, wait for all groups of the version: otherwise a step's groups would depend on the order of arrival.
        # While a version is overdue, ``unpublished`` may exceed its steps; the next step still needs its own groups.
        steps = max(1, learner.steps_per_version - self.unpublished)
        return learner.groups_per_step * min(steps, max(1, learner.steps - self.step + 1))

    def inputs(self, buffer: GroupBuffer, config: Config) -> PlanInputs | None:
        """The inputs of the step's plan with the oldest groups now in the buffer; None if there are too few."""
        if len(buffer) < self.groups_wanted(config):
            return None
        return self.inputs_of(buffer.look_up(buffer.oldest(config.learner.groups_per_step)))

    def inputs_of(self, groups: Sequence[Group]) -> PlanInputs:
        """The inputs of the step's plan with these groups."""
        return PlanInputs(self.step, self.version, self.unpublished == 0, tuple(groups))


@dataclass(frozen=True, slots=True, eq=False)
class PlanInputs:
    """Everything that the plan of a step depends on."""

    step: int
    version: int
    fresh: bool
    """Whether no step was trained since the version was published."""
    groups: tuple[Group, ...]
    """Groups in the order in which they are trained."""

    def make_same_plan(self, other: PlanInputs) -> bool:
        """Whether both inputs give the same plan.

        Groups must be the same objects: a group that was generated again has the same uid and other tokens.
        """
        return (
            (self.step, self.version, self.fresh) == (other.step, other.version, other.fresh)
            and len(self.groups) == len(other.groups)
            and all(group is other_group for group, other_group in zip(self.groups, other.groups, strict=True))
        )


def plan_step(
    groups: Sequence[Group],
    *,
    version: int,
    fresh: bool,
    step: int,
    config: Config,
    backend: Backend,
    advantage: Advantage,
    teacher: Sequence[GroupScores] | None = None,
    supervised: SupervisedSteps | None = None,
) -> StepPlan:
    """Plan step ``step``, counted from 1: its updates, and the supervised term.

    If ``learner.kl`` is part of the reward, the reference scores the groups first. If ``needs_scores(config)``, call
    this function on the backend's thread. The other arguments are those of build_step. Raises NonFiniteStep or
    ConfigError.
    """
    plan = build_step(
        groups,
        advantage=advantage,
        penalties=_penalties(groups, step, config, backend),
        teacher=teacher,
        version=version,
        fresh=fresh,
        config=config,
        world_size=config.learner.row_groups,
        packed=backend.packed,
        shared=backend.shares_prefixes,
        skip_zero_advantages=backend.skips_zero_advantages,
    )
    return plan if supervised is None else supervised.beside(plan, step)


def needs_scores(config: Config) -> bool:
    """Whether a reference or a teacher must score a step's groups before the step can be planned."""
    learner = config.learner
    return learner.backend != "sim" and (learner.kl.in_reward or learner.teacher_url is not None)


def _penalties(groups: Sequence[Group], step: int, config: Config, backend: Backend) -> Penalties | None:
    """Let the reference score the groups, and compute their KL penalties; None if rewards have no such penalty."""
    learner = config.learner
    if not learner.kl.in_reward or learner.backend == "sim" or not groups:
        return None
    scoring = build_scoring(
        groups,
        config=config,
        world_size=learner.row_groups,
        packed=backend.packed,
        shared=backend.shares_prefixes,
    )
    return kl_penalties(groups, by_group(groups, backend.score(scoring)), learner.kl, step=step)


@dataclass(frozen=True, slots=True)
class _EarlyPlan:
    """A plan that was begun before its step, and the inputs that the step must have to use it."""

    inputs: PlanInputs
    plan: asyncio.Future[StepPlan]


class StepPlanner:
    """Waits for groups and makes plans. ``thread`` is the backend's; early plans have a thread of their own."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        progress: TrainingProgress,
        backend: Backend,
        thread: ThreadPoolExecutor,
        intake: Intake,
        dataloader: DataloaderLink,
        versions: Versions,
        track: Track,
        advantage: Advantage,
        supervised: SupervisedSteps | None,
        teacher: ServedTeacher | None,
    ) -> None:
        self.waited = False
        """Whether the newest step had to wait for groups; False if all engines sleep while the learner computes."""
        self._config, self._name = config, services.name
        self._states, self._clock, self._counters = services.states, services.clock, services.counters
        self._log, self._awaits = services.log, services.awaits
        self._progress, self._news = progress, progress.news.listen()
        self._backend, self._thread = backend, thread
        self._intake, self._dataloader, self._versions, self._track = intake, dataloader, versions, track
        self._advantage, self._supervised, self._teacher = advantage, supervised, teacher
        self._next: NextStep | None = None
        """The step to plan early, or None."""
        self._plan_again = progress.news.listen()
        """Event that wakes ``run``: groups or versions came, or another step is to be planned."""
        self._early: _EarlyPlan | None = None
        """The newest early plan; None if it was used or discarded."""
        self._early_thread = ThreadPoolExecutor(1, thread_name_prefix="plan")

    async def wait(self) -> bool:
        """Wait until the next step's groups are in the buffer and scored.

        Returns False if the run is preempted, after a limited wait for groups under way. Raises CannotLearn, and
        ActorFailed if an overdue version cannot be published for too long.
        """
        with self._awaits.on("rollouter", "groups"):
            return await self._wait()

    async def rest(self) -> None:
        """In time slices, let engines have the learner's GPUs until the backend's next call.

        The parameter server gets the newest version first, if it can within ``weights.deadline_s``, because engines
        load what it holds when they wake. Returns early, and changes nothing, when news comes meanwhile.
        """
        if not self._backend.engines_in_turn or self._backend.is_resting:
            return
        self._news.clear()
        waits = [asyncio.ensure_future(wait) for wait in (self._versions.handed_over(), self._news.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not self._news.is_set():
            await run_on(self._thread, self._backend.rest)

    async def _wait(self) -> bool:
        """Do what ``wait`` says; while a version is overdue, try it again at each ``retry_at``."""
        intake = self._intake
        self._track.enter("wait for groups", step=self._progress.step + 1)
        wanted = self._begin_wait()
        # If all engines sleep while the learner computes, every step waits, even with a higher staleness. Engines that
        # joined later do not count.
        all_sleep = self._backend.engines_in_turn >= self._config.rollout.replicas
        self.waited = not all_sleep and len(intake.buffer) < wanted
        give_up_at = retry_at = 0.0
        was_overdue = False
        while True:
            self._news.clear()
            if problem := intake.problem():
                raise CannotLearn(self._name, problem)
            if self._progress.preempted:
                await self._wait_for_last_groups()
                return False
            if len(intake.buffer) >= wanted and self._are_scored(wanted):
                return True
            await self.rest()
            if not self._versions.is_overdue:
                was_overdue = False
                await self._news.wait()
                continue
            if not was_overdue:
                give_up_at, retry_at, was_overdue = self._versions.give_up_at, self._versions.next_try, True
            try:
                # The timeout ends at a fixed time, so that frequent news does not postpone the version.
                async with asyncio.timeout(max(0.0, retry_at - self._clock.now())):
                    await self._news.wait()
            except TimeoutError:
                await self._versions.retry(give_up_at)
                # A step under a new version may need more groups.
                wanted = self._begin_wait()
                retry_at = self._versions.next_try

    def _begin_wait(self) -> int:
        """Choose the next step for early planning. Returns the number of groups that it waits for."""
        self._states.enter("waiting", "groups")
        step = NextStep.of(self._progress)
        self.plan_early(step)
        return step.groups_wanted(self._config)

    def _are_scored(self, wanted: int) -> bool:
        """Whether the teacher on a server, if there is one, has scored the ``wanted`` oldest groups."""
        buffer = self._intake.buffer
        uids = set(buffer.oldest(wanted))
        return self._teacher is None or self._teacher.has_done([g for g in buffer.groups if g.lease.uid in uids])

    async def _wait_for_last_groups(self) -> None:
        """Wait, for a share of preempt.grace_s, until rollouters have delivered or returned all groups under way."""
        self._states.enter("waiting", "last groups")
        limit_s, dataloader = LAST_GROUPS_SHARE * self._config.preempt.grace_s, self._dataloader
        try:
            async with asyncio.timeout(limit_s):
                # ``outstanding`` also counts the groups in the buffer, since no outcome of these is reported.
                while not (dataloader.status.exhausted and dataloader.status.outstanding <= len(self._intake.buffer)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._log.warning("not all groups came in before the checkpoint", waited_s=limit_s)

    def plan_early(self, step: NextStep | None) -> None:
        """Set the step that is planned early from now on; None for no early plans."""
        self._next = step if not needs_scores(self._config) else None
        self._plan_again.set()

    async def run(self) -> None:
        """Make early plans until cancelled; after each, pause for as long as it took."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._plan_again.wait()
            self._plan_again.clear()
            began = clock()
            inputs = self._next.inputs(self._intake.buffer, self._config) if self._next is not None else None
            if inputs is not None and not (self._early is not None and self._early.inputs.make_same_plan(inputs)):
                self._discard_early_plan()
                # asyncio.wait does not raise the plan's error; the step that uses the plan raises it.
                await asyncio.wait([self._begin_early_plan(inputs)])
            await asyncio.sleep(clock() - began)

    async def plan(self, inputs: PlanInputs) -> StepPlan:
        """Return the plan of the step that begins: the early plan if its inputs are the same, else a new plan.

        A new plan waits for the scores of a teacher on a server. Raises the errors of ``plan_step``, and ActorFailed.
        """
        if self._early is not None and self._early.inputs.make_same_plan(inputs):
            # Clear ``_early`` before the await: during the await ``run`` may begin another plan.
            early, self._early = self._early, None
            self._counters.add("learner/plans_ahead")
            return await early.plan
        self._discard_early_plan()
        teacher = await self._teacher.scores(inputs.groups) if self._teacher is not None else None
        return await run_on(self._thread, self._make, inputs, teacher)

    def close(self) -> None:
        """Stop planning; call it after ``run`` has ended."""
        if self._early is not None:
            self._early.plan.cancel()
        self._early_thread.shutdown(wait=False, cancel_futures=True)

    def _begin_early_plan(self, inputs: PlanInputs) -> asyncio.Future[StepPlan]:
        plan = asyncio.get_running_loop().run_in_executor(self._early_thread, self._make, inputs, None)
        # Retrieve the error, so that asyncio logs nothing about a plan that no step uses.
        plan.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._early = _EarlyPlan(inputs, plan)
        return plan

    def _make(self, inputs: PlanInputs, teacher: Sequence[GroupScores] | None) -> StepPlan:
        """Make a plan, on the backend's thread or the thread of early plans."""
        return plan_step(
            inputs.groups,
            version=inputs.version,
            fresh=inputs.fresh,
            step=inputs.step,
            config=self._config,
            backend=self._backend,
            advantage=self._advantage,
            teacher=teacher,
            supervised=self._supervised,
        )

    def _discard_early_plan(self) -> None:
        if self._early is not None:
            self._counters.add("learner/plans_discarded")
            self._early = None

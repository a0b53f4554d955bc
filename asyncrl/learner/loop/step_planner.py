"""The plan of each step: made while the step before is trained, or when its own step begins.

The groups of a step are chosen when it begins. An early plan is a guess: it takes the groups that would be chosen now,
and is made again if older groups come meanwhile. Planning takes at most half of the time.

Invariant: an early plan is used only if the step begins with the very same groups under the same version. A plan is a
function of these, so every step is the same as without early plans. If a model has to score the groups first, nothing
is planned early.

An error of an early plan is raised in the step that uses the plan. If no step does, its groups are planned again later,
and fail there. Otherwise fails as build_step, scoring.py and the backend say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.learner.algorithm.advantages import Advantage, Penalties
from asyncrl.learner.algorithm.batch import GroupScores, StepPlan, build_step
from asyncrl.learner.algorithm.scoring import build_scoring, by_group, kl_penalties
from asyncrl.learner.algorithm.supervised import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.progress import NextStep, PlanInputs, Progress
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.messages.groups import Group
from asyncrl.observe.metrics import Counters


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
    """Plan of step ``step``, counted from 1: reference scores first if needed, the updates, the supervised term.

    The rest as for build_step. Runs on the backend's thread if the backend has to score first (``needs_scores``), else
    on any. Raises NonFiniteStep or ConfigError.
    """
    plan = build_step(
        groups,
        advantage=advantage,
        penalties=_penalties(groups, step, config, backend),
        teacher=teacher,
        version=version,
        fresh=fresh,
        config=config,
        world_size=config.learner.ranks,
        packed=backend.packed,
        shared=backend.shares_prefixes,
        skip_zero_advantages=backend.skips_zero_advantages,
    )
    return plan if supervised is None else supervised.beside(plan, step)


def needs_scores(config: Config) -> bool:
    """Whether a model has to score a step's groups before they can be planned."""
    learner = config.learner
    return learner.backend != "sim" and (learner.kl.in_reward or learner.teacher_url is not None)


def _penalties(groups: Sequence[Group], step: int, config: Config, backend: Backend) -> Penalties | None:
    learner = config.learner
    if not learner.kl.in_reward or learner.backend == "sim" or not groups:
        return None
    scoring = build_scoring(
        groups,
        config=config,
        world_size=learner.ranks,
        packed=backend.packed,
        shared=backend.shares_prefixes,
    )
    return kl_penalties(groups, by_group(groups, backend.score(scoring)), learner.kl, step=step)


@dataclass(frozen=True, slots=True)
class _Early:
    inputs: PlanInputs
    plan: asyncio.Future[StepPlan]


class StepPlanner:
    """The planner of steps. ``thread`` is that of ``backend``; early plans have a thread of their own."""

    def __init__(
        self,
        config: Config,
        *,
        backend: Backend,
        thread: ThreadPoolExecutor,
        intake: Intake,
        progress: Progress,
        counters: Counters,
        advantage: Advantage,
        supervised: SupervisedSteps | None,
        teacher: ServedTeacher | None,
    ) -> None:
        self._config, self._backend, self._thread = config, backend, thread
        self._intake, self._counters, self._advantage = intake, counters, advantage
        self._supervised, self._teacher = supervised, teacher
        self._next: NextStep | None = None
        """The step that is to be planned early."""
        self._changed = progress.news.listen()
        self._early: _Early | None = None
        self._early_thread = ThreadPoolExecutor(1, thread_name_prefix="plan")

    def plan_early(self, step: NextStep | None) -> None:
        """Plan this step early from now on, or none."""
        self._next = step if not needs_scores(self._config) else None
        self._changed.set()

    async def run(self) -> None:
        """Make early plans, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = clock()
            inputs = self._next.inputs(self._intake.buffer, self._config) if self._next is not None else None
            if inputs is not None and not (self._early is not None and self._early.inputs.make_same_plan(inputs)):
                self._discard()
                # ``wait`` raises no error of the plan: the step that uses the plan does.
                await asyncio.wait([self._begin(inputs)])
            await asyncio.sleep(clock() - began)

    async def plan(self, inputs: PlanInputs) -> StepPlan:
        """The plan of the step that begins."""
        if self._early is not None and self._early.inputs.make_same_plan(inputs):
            # Taken before the wait, in which ``run`` may discard what it finds here.
            early, self._early = self._early, None
            self._counters.add("learner/plans_ahead")
            return await early.plan
        self._discard()
        teacher = await self._teacher.scores(inputs.groups) if self._teacher is not None else None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, inputs, teacher)

    def close(self) -> None:
        """Plan nothing more; ``run`` has ended."""
        if self._early is not None:
            self._early.plan.cancel()
        self._early_thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, inputs: PlanInputs) -> asyncio.Future[StepPlan]:
        plan = asyncio.get_running_loop().run_in_executor(self._early_thread, self._make, inputs, None)
        # The error of a plan that no step uses is ignored.
        plan.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._early = _Early(inputs, plan)
        return plan

    def _make(self, inputs: PlanInputs, teacher: Sequence[GroupScores] | None) -> StepPlan:
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

    def _discard(self) -> None:
        if self._early is not None:
            self._counters.add("learner/plans_discarded")
            self._early = None

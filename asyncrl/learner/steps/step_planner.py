"""The source of each step's plan: one made early, beside the training, or one made when the step begins.

It keeps: either way it is the plan of the groups and the version with which the step begins. Where a model has to score
them first, nothing is planned early.

Fails as build_step, kl_reward.py and the backend say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.config import Config
from asyncrl.learner.algorithm.advantage.advantages import Penalties
from asyncrl.learner.algorithm.plan.batch import GroupScores, StepPlan, build_step
from asyncrl.learner.algorithm.plan.kl_reward import kl_penalties
from asyncrl.learner.algorithm.plan.scoring import build_scoring, by_group
from asyncrl.learner.algorithm.plan.supervised import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.steps.plan_ahead import Basis, Outlook, PlanAhead
from asyncrl.messages.groups import Group
from asyncrl.telemetry.metrics import Figures


def plan_step(
    groups: Sequence[Group],
    *,
    version: int,
    fresh: bool,
    step: int,
    config: Config,
    backend: Backend,
    teacher: Sequence[GroupScores] | None = None,
    supervised: SupervisedSteps | None = None,
) -> StepPlan:
    """Plan of step ``step``, counted from 1: the scores that come first, the updates, conversations beside them.

    The rest as for build_step. Runs on the thread of the backend where that has to score first (``needs_scores``), else
    on any. Raises NonFiniteStep or ConfigError.
    """
    plan = build_step(
        groups,
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


class StepPlanner:
    """The planner of steps. ``thread`` is that of ``backend``; ``chosen`` are the groups that a step would have if it
    began now, as far as is known, or none.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        thread: ThreadPoolExecutor,
        *,
        supervised: SupervisedSteps | None,
        teacher: ServedTeacher | None,
        chosen: Callable[[Outlook], Sequence[Group]],
        counters: Figures,
    ) -> None:
        self._config, self._backend, self._thread = config, backend, thread
        self._supervised, self._teacher, self._chosen = supervised, teacher, chosen
        self._outlook: Outlook | None = None
        """The next step that is to be planned early."""
        self.ahead = PlanAhead(self._expected, lambda basis: self._made_of(basis, None), backend.send, counters)

    def foresee(self, outlook: Outlook | None) -> None:
        """Plan this step early, or none."""
        self._outlook = outlook if not needs_scores(self._config) else None
        self.ahead.look_again()

    async def plan(self, basis: Basis) -> tuple[StepPlan, int]:
        """The plan of the step that begins, and the number under which it was sent ahead; 0 where it was not."""
        if (early := await self.ahead.take(basis)) is not None:
            return early
        teacher = await self._teacher.scores(basis.groups) if self._teacher is not None else None
        running = asyncio.get_running_loop()
        return await running.run_in_executor(self._thread, self._made_of, basis, teacher), 0

    def _expected(self) -> Basis | None:
        """The basis on which the next step would be planned if it began now; None where that is not known yet."""
        groups = self._chosen(self._outlook) if self._outlook is not None else ()
        return self._outlook.basis(groups) if self._outlook is not None and groups else None

    def _made_of(self, basis: Basis, teacher: Sequence[GroupScores] | None) -> StepPlan:
        return plan_step(
            basis.groups,
            version=basis.version,
            fresh=basis.fresh,
            step=basis.step,
            config=self._config,
            backend=self._backend,
            teacher=teacher,
            supervised=self._supervised,
        )

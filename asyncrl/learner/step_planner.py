"""The source of each step's plan: one made early, beside the training, or one made when the step begins.

It keeps: either way it is the plan of the groups and the version with which the step begins. Where a model has to score
them first, nothing is planned early.

Fails as planning.py and the backend say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import GroupScores, StepPlan
from asyncrl.learner.algorithm.supervised import SupervisedSteps
from asyncrl.learner.backend import Backend
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.plan_ahead import Basis, Outlook, PlanAhead
from asyncrl.learner.planning import needs_scores, plan_step
from asyncrl.messages.groups import Group
from asyncrl.monitor.metrics import Figures


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

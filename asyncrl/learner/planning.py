"""Making the plan of a step: the scores that come first, its updates, and the conversations beside them.

Runs on the thread of the backend where that has to score first (``needs_scores``), else on any. Fails as build_step and
kl_reward.py say.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import GroupScores, StepPlan, build_step
from asyncrl.learner.algorithm.kl_reward import kl_penalties
from asyncrl.learner.algorithm.penalties import Penalties
from asyncrl.learner.algorithm.scoring import build_scoring, by_group
from asyncrl.learner.algorithm.supervised import SupervisedSteps
from asyncrl.learner.backend import Backend
from asyncrl.messages.groups import Group


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
    """The plan of step ``step``, counted from 1; the rest as for build_step. Raises NonFiniteStep or ConfigError."""
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

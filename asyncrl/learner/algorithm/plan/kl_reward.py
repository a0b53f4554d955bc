"""The divergence from a frozen reference, as a part of the reward: ``learner.kl.place = "reward"`` subtracts it.

    penalty of a token = coefficient * k(log(pi_b / pi_ref)),   k = k1 by default

pi_b is the policy that sampled the token, under the version that did, as the engine reported it: on its own samples
the mean of each estimator is KL(pi_b || pi_ref) (k2 nearly; http://joschu.net/blog/kl-approx.html). The penalties of a
trajectory are subtracted from its reward before the advantages are taken, as in InstructGPT (arXiv 2203.02155, eq. 2)
and its forebear (arXiv 1909.08593, section 2), so that its group's baseline has them too. A turn is charged with all of
them but those of the turns before it in its sequence: rewards that an action cannot have brought about have no part in
its gradient. All sampled tokens count, masked and late ones among them, since all trajectories are in the baseline.

No gradient goes through it. Whether a group tells anything apart is still judged by the reward as the reward function
gave it. Pure, in numpy.

Fails with NonFiniteStep where a log-prob of the reference is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from asyncrl.config.algorithm import KLConfig
from asyncrl.errors import NonFiniteStep
from asyncrl.learner.algorithm.advantage.advantages import Penalties
from asyncrl.learner.algorithm.plan.batch import GroupScores
from asyncrl.messages.groups import Group
from asyncrl.trajectories import past_rewards

LOG_RATIO_LIMIT = 20.0
"""Nats at which a log-ratio is clamped, as every log-ratio of a loss is."""
ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda r: r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: np.exp(-r) - 1 + r,
}
"""Estimators by name, as functions of r = log(pi_b / pi_ref)."""


def kl_penalties(
    groups: Sequence[Group], reference: Sequence[GroupScores], config: KLConfig, *, step: int
) -> Penalties:
    """The penalties of a step from the reference's log-probs, nats. Raises NonFiniteStep."""
    estimate = ESTIMATORS[config.estimator_used]
    total: list[np.ndarray] = []
    past: list[list[np.ndarray]] = []
    divergence, tokens = 0.0, 0
    for group, of_group in zip(groups, reference, strict=True):
        sums, befores = [], []
        for trajectory, of_trajectory in zip(group.trajectories, of_group, strict=True):
            turns, before = [np.zeros(0)], [np.zeros(0)]
            for sequence, scores in zip(trajectory.sequences, of_trajectory, strict=True):
                ratio = sequence.logprobs.astype(np.float64) - scores
                if not np.isfinite(ratio).all():
                    raise NonFiniteStep("log-probs by the reference", step=step, uids=[group.lease.uid])
                values = estimate(np.clip(ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
                ends = np.cumsum(past_rewards(sequence)[1])
                # These are the sums up to the beginning of each turn, and up to the end of the last.
                sofar = np.concatenate([np.zeros(1), np.cumsum(values)])[np.concatenate([np.zeros(1, np.int64), ends])]
                turns.append(np.diff(sofar))
                before.append(sofar[:-1])
                tokens += len(values)
            sums.append(config.coefficient * float(np.concatenate(turns).sum()))
            befores.append(config.coefficient * np.concatenate(before))
        divergence += sum(sums)
        total.append(np.array(sums))
        past.append(befores)
    count = sum(map(len, total))
    metrics = {"reward/kl_penalty": divergence / max(1, count)}
    if tokens:
        metrics["policy/reference_kl"] = divergence / config.coefficient / tokens
    return Penalties(total, past, metrics)

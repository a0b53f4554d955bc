"""Advantage estimators: pure functions from the rewards of one prompt group to one advantage a trajectory, or a turn.

Each takes float64 [n] with n >= 2 (masked trajectories included: they belong to the baseline) and returns
float64 [n]; every token of a trajectory has its trajectory's advantage. Rewards that are all equal give
zeros. ``turn_advantages`` leaves out of each turn what it cannot have brought about.

Fails with ValueError for fewer than two rewards or one that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

Estimator = Literal["grpo", "dr_grpo", "rloo"]

STD_EPSILON = 1e-6
"""Added to the standard deviation of GRPO: bounds the advantage of a group whose rewards all but agree."""


def grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with n - 1.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2). The paper does not say which standard deviation; the
    sample's is what verl and TRL take.
    """
    centred = _centred(rewards)
    advantages: np.ndarray = centred / (_std(centred) + STD_EPSILON)
    return advantages


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r): without the standard deviation, which favours very easy and very hard prompts.

    Dr. GRPO (arXiv 2503.20783, section 3.2).
    """
    return _centred(rewards)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other n - 1 rewards = n / (n - 1) * (r_i - mean(r)).

    REINFORCE leave-one-out (arXiv 2402.14740, section 3.3).
    """
    centred = _centred(rewards)
    return centred * (len(centred) / (len(centred) - 1))


ESTIMATORS: dict[Estimator, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}


def turn_advantages(estimator: Estimator, rewards: np.ndarray, past: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantage of each turn; ``past`` and the result hold float64 [turns] for each trajectory.

    The return of turn t of trajectory i is r_i - past_it, its reward to go (the policy gradient theorem: rewards that
    an action cannot have brought about have no part in its gradient; Sutton and others, 2000). It is held against the
    baseline of its trajectory, and counted on one scale with it, A_i being the trajectory's advantage::

        dr_grpo, rloo    A_it = A_i - past_it
        grpo             A_it = (r_i - past_it - mean(r)) / (s + 1e-6)

    s is the larger of std(r) and of the spread of the turns, sqrt(sum over i of the mean over t of (r_i - past_it -
    mean(r))^2 / (n - 1)), which is std(r) where nothing is past: the process supervision of GRPO takes the deviation of
    all rewards likewise (arXiv 2402.03300, section 4.1.3). Where trajectories all but agree and their turns do not,
    std(r) alone would blow these up a million times. Where nothing is past, turns have A_i.
    """
    if estimator != "grpo":
        return [a - turns for turns, a in zip(past, ESTIMATORS[estimator](rewards), strict=True)]
    centred = _centred(rewards)
    returns = [r - turns for turns, r in zip(past, centred, strict=True)]
    of_turns = np.array([np.mean(of_it**2) if len(of_it) else 0.0 for of_it in returns])
    spread = max(_std(centred), float(np.sqrt(of_turns.sum() / (len(centred) - 1))))
    return [of_it / (spread + STD_EPSILON) for of_it in returns]


def _std(centred: np.ndarray) -> float:
    return float(np.sqrt(np.sum(centred**2) / (len(centred) - 1)))


def _centred(rewards: np.ndarray) -> np.ndarray:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"an advantage needs the rewards of at least 2 trajectories, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {values.tolist()}")
    if np.all(values == values[0]):
        # The mean of equal numbers may differ from them in the last bit.
        return np.zeros_like(values)
    centred: np.ndarray = values - values.mean()
    return centred

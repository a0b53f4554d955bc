"""Advantage estimators: pure functions from the rewards of one prompt group to one advantage a trajectory.

Each takes float64 [n] with n >= 2 (masked trajectories included: they belong to the baseline) and returns
float64 [n]; every token of a trajectory has its trajectory's advantage. Rewards that are all equal give
zeros.

Fails with ValueError for fewer than two rewards or one that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
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
    advantages: np.ndarray = centred / (np.sqrt(np.sum(centred**2) / (len(centred) - 1)) + STD_EPSILON)
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

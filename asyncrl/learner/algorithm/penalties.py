"""Penalties, which are subtracted from the rewards of a step before its advantages are taken. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Penalties:
    """Amounts to subtract, in units of the reward. ``past`` and ``total`` are of a group's trajectories, in order."""

    total: list[np.ndarray]
    """Penalty of each trajectory: for each group float64 [n]."""
    past: list[list[np.ndarray]]
    """Part of the penalty from before each turn in its sequence: for each group and trajectory float64 [turns]."""
    metrics: dict[str, float]
    """``reward/kl_penalty``, the mean of a trajectory, and ``policy/reference_kl``, that of a sampled token, nats."""

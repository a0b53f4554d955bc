"""The learning rate of a step: a pure function of the step and the configuration.

Invariant: every step from the first to the last has a rate above 0, if the peak is above 0. A decay reaches its minimum
one step after the last, so no batch is generated for an update of rate 0.
"""

from __future__ import annotations

import math

from asyncrl.config.algorithm import SftConfig
from asyncrl.config.training import LearnerConfig


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Learning rate of ``step`` (1 to N = ``config.steps``), with W = max(1, warmup_steps) and f = min_lr_ratio.

    Warm-up: lr * step / W up to step W, which has the peak. Then x = (step - W) / (N + 1 - W) rises to 1 at step N + 1,
    one after the last, and stays 1. constant: lr; linear: lr * (1 - (1 - f) x); cosine: lr * (f + (1 - f) (1 +
    cos(pi x)) / 2).
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    x, floor = _decayed(step, config.warmup_steps, config.steps), config.min_lr_ratio
    if config.decay == "linear":
        return config.lr * (1.0 - (1.0 - floor) * x)
    if config.decay == "cosine":
        return config.lr * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * x)) / 2.0)
    return config.lr


def warm_learning_rate(step: int, learner: LearnerConfig, sft: SftConfig) -> float:
    """Learning rate of a warm step (1 to ``sft.warm_steps``).

    The rate rises over ``sft.rise_steps`` and falls linearly, to 0 one step after the last. The peak is ``sft.lr`` if
    set, else ``learner.lr``.
    """
    peak = learner.lr if sft.lr is None else sft.lr
    if step < sft.rise_steps:
        return peak * step / sft.rise_steps
    return peak * (1.0 - _decayed(step, sft.rise_steps, sft.warm_steps))


def _decayed(step: int, rise: int, steps: int) -> float:
    """Return x of ``learning_rate``: 0 at the step with the peak, 1 from one step after the last on."""
    peak_at = max(1, rise)
    return min(1.0, (step - peak_at) / max(1, steps + 1 - peak_at))

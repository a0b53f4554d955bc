"""The learning rate: a pure function of the step."""

from __future__ import annotations

import math

from asyncrl.config.sft import SftConfig
from asyncrl.config.training import LearnerConfig


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Learning rate of ``step`` (from 1 to ``config.steps``).

    Warm-up: lr * step / warmup_steps up to warmup_steps. After it x runs from 0 to 1 at the last step, and
    with f = min_lr_ratio: constant lr; linear lr * (1 - (1 - f) x); cosine lr * (f + (1 - f) (1 + cos(pi x))
    / 2). Steps past the last keep its learning rate.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    x = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    floor = config.min_lr_ratio
    if config.decay == "linear":
        return config.lr * (1.0 - (1.0 - floor) * x)
    if config.decay == "cosine":
        return config.lr * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * x)) / 2.0)
    return config.lr


def warm_learning_rate(step: int, learner: LearnerConfig, sft: SftConfig) -> float:
    """Learning rate of a warm step (from 1 to ``sft.warm_steps``): peak * step / rise_steps up to rise_steps, then
    linear to 0 behind the last one.
    """
    peak = learner.lr if sft.lr is None else sft.lr
    if step < sft.rise_steps:
        return peak * step / sft.rise_steps
    return peak * (sft.warm_steps + 1 - step) / (sft.warm_steps + 1 - sft.rise_steps)

"""Finds settings with which a run can learn nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import Config


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A setting with which a run learns nothing."""

    key: str
    detail: str
    """Consequence of the setting, in words."""
    fix: str


def obstacles(config: Config) -> list[Obstacle]:
    """Return the obstacles in this configuration.

    Only ``lr = 0`` stops learning by the rate: no schedule lets a rate above 0 reach 0 before its last step.
    """
    learner, reward = config.learner, config.reward
    found: list[Obstacle] = []
    if not learner.steps:
        return found
    if learner.lr == 0.0:
        detail = f"at 0 none of the {learner.steps} steps will change the weights"
        found.append(Obstacle("learner.lr", detail, "set learner.lr to train, as 1e-6 for a whole model"))
    varies = reward.options.get("spread") or reward.truncated == "penalty"
    if reward.function == "constant" and not varies and learner.backend != "sim":
        detail = "constant gives every response the same, and nothing is learnt from equal rewards"
        if learner.dynamic_sampling:
            detail += "; the run ends once learner.max_filtered_ratio of its groups are filtered"
        found.append(Obstacle("reward.function", detail, "take one that separates right responses from wrong ones"))
    return found

"""Detects that the run cannot learn, with one notice per reason: no learning rate, no gradient, no signal in rewards.
Pure.

Invariant: a notice needs an exact condition over STEPS steps, or as many groups, so a run that learns gets none. A
missing number in a line changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.learnable import obstacles
from asyncrl.core.numbers import fixed
from asyncrl.messages.actors import Notice
from asyncrl.observe.metrics_line import number_in

STEPS = 3
"""Steps in a row, or groups of as many steps, before a notice."""
LEAST_GROUPS = 32
"""Least number of groups: equal rewards of fewer groups may be chance."""
FILTERED_SHARE = 0.5
"""Share of the limit of filtered groups from which on a notice says that the run will end."""


class LearningWatch:
    """Watches whether the run can learn."""

    def __init__(self, config: Config) -> None:
        self._obstacles = obstacles(config)
        self._learner = config.learner
        self._max_tokens = config.rollout.max_tokens
        self._given: set[str] = set()
        self._still = 0
        """Steps in a row with a gradient of 0."""
        self._groups = 0
        """Groups in a row whose rewards all lie between the next two, and these are equal."""
        self._low = self._high = 0.0

    def at_start(self) -> list[Notice]:
        """Notices before the first step."""
        found: list[Notice] = []
        for each in self._obstacles:
            found += self._once(each.key, f"{each.key}: {each.detail}. To do: {each.fix}")
        return found

    def after_step(self, line: Mapping[str, Any]) -> list[Notice]:
        """Notices after a trained step with this line of metrics."""
        step = line.get("step", "?")
        self._still = self._still + 1 if number_in(line, "policy/grad_norm") == 0.0 else 0
        if self._still < STEPS:
            return []
        return self._once(
            "no gradient",
            f"the gradient was exactly 0 in the last {STEPS} steps, up to {step}: they changed nothing that is "
            "learnt. Either all rewards of each group are equal (learner.dynamic_sampling = false trains such groups, "
            "too; see reward/std, reward.function), or no parameter of the model takes part in the loss",
        )

    def group_came(self, rewards: np.ndarray, *, filtered: int) -> list[Notice]:
        """Notices after the delivery of a group with these rewards ([n]); ``filtered`` groups have
        been filtered since the last step because their rewards are equal.
        """
        return [*self._equal_rewards(rewards), *self._mostly_filtered(filtered)]

    def _equal_rewards(self, rewards: np.ndarray) -> list[Notice]:
        low, high = float(rewards.min()), float(rewards.max())
        if self._groups and max(high, self._high) - min(low, self._low) <= self._learner.signal_tolerance:
            self._groups, self._low, self._high = self._groups + 1, min(low, self._low), max(high, self._high)
        elif high - low <= self._learner.signal_tolerance:
            self._groups, self._low, self._high = 1, low, high
        else:
            self._groups = 0
        if self._groups < max(LEAST_GROUPS, STEPS * self._learner.groups_per_step):
            return []
        return self._once(
            "equal rewards",
            f"every reward of the last {self._groups} groups is {fixed(high, 3)}: nothing is learnt from equal "
            "rewards. Either reward.function gives this to every response (call it by hand on a right and a wrong "
            "one), or the prompts are all too hard or all too easy for this model (data.path), or responses are cut "
            f"before their answer (rollout.max_tokens = {self._max_tokens}), or the reward function fails on all "
            "others, which are left out",
        )

    def _mostly_filtered(self, filtered: int) -> list[Notice]:
        most = self._learner.max_filtered_ratio * self._learner.groups_per_step
        if filtered < FILTERED_SHARE * most:
            return []
        return self._once(
            "mostly filtered",
            f"{filtered} groups were filtered since the last step, as all rewards in each of them are equal; the run "
            f"ends once {most:g} (learner.max_filtered_ratio times groups_per_step) are passed, with those that are "
            "quarantined. Prompts of medium difficulty "
            "(data.path), more rollout.samples_per_prompt or a finer reward.function give a signal",
        )

    def _once(self, key: str, text: str) -> list[Notice]:
        if key in self._given:
            return []
        self._given.add(key)
        return [Notice(key=key, text=text)]

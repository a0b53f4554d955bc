"""The built-in advantages, and the signal of a group, without which its advantages teach nothing. Pure.

An advantage is a function from the rewards of a step's groups to one number for each turn.

Masked trajectories (batch.py) are included: they belong to the baseline. Every token of a turn has the advantage of its
turn. Except under ``reinforce``, the advantages of a group are 0 if all its rewards are equal and every past_it (below)
is 0.

The return of turn t of trajectory i is r_i - past_it, where past_it is the reward that the turn cannot have caused
(``Turn.past_reward``). This is the reward of earlier turns, and of turns in parallel branches, even later ones. The
return is the reward to go (policy gradient theorem, Sutton and others, 2000).
All turns of a trajectory have one baseline, a mean of rewards r. If every past_it is 0, they have one advantage too.

``has_signal`` is dynamic sampling: DAPO (arXiv 2503.14476, section 3.2) leaves out prompts whose answers are all right
or all wrong. ``learner.signal`` names the number that is compared: a component, or the reward before the overlong
penalty. With the penalty, one slightly long right answer would make a group of right answers differ. ``has_signal``
raises ConfigError if no trajectory has the component and no scoring ran out of time.

A user's own function returns for each group float64 [n], one advantage for each trajectory, or n arrays [turns].

Fails with ValueError for a reward that is not finite and, except under ``reinforce``, for a group of fewer than two
trajectories. ``checked`` turns the error into a ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.built_in import BuiltIn
from asyncrl.messages.groups import Group, rewards_of, sampled_tokens, turns_past
from asyncrl.messages.reward import PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.workers.user_code import describe

REWARD = "reward"
"""Value of learner.signal that names the reward itself."""
STD_EPSILON = 1e-6
"""Added to the standard deviation of GRPO: bounds the advantage of a group with nearly equal rewards."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a step, subtracted from its rewards before the advantages; in the order of groups, trajectories."""

    total: list[np.ndarray]
    """Penalty of each trajectory: for each group float64 [n]."""
    past: list[list[np.ndarray]]
    """Penalty of all earlier turns in a turn's sequence: for each group and trajectory float64 [turns]."""
    metrics: dict[str, float]
    """``reward/kl_penalty``: mean over trajectories. ``policy/reference_kl``: mean over sampled tokens, nats."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The n trajectories of a group: the input of an advantage function."""

    uid: str
    rewards: np.ndarray
    """Reward of each trajectory: float64 [n]."""
    past: Sequence[np.ndarray]
    """Reward that each turn cannot have caused (``Turn.past_reward``): float64 [turns] for each trajectory."""
    lengths: np.ndarray
    """Sampled tokens of each trajectory: int64 [n]."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 [n] for each component of the reward; NaN where a trajectory has none."""


def scored_group(group: Group) -> ScoredGroup:
    """Collect the rewards, lengths and components of a group's trajectories, as the input of an advantage."""
    trajectories = group.trajectories
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.components)
    return ScoredGroup(
        uid=group.lease.uid,
        rewards=rewards_of(group),
        past=[turns_past(trajectory) for trajectory in trajectories],
        lengths=np.array([sampled_tokens(trajectory) for trajectory in trajectories], np.int64),
        components={
            name: np.array([trajectory.components.get(name, np.nan) for trajectory in trajectories], np.float64)
            for name in names
        },
    )


Advantages = list[list[np.ndarray]]
"""Advantage of each turn: for each group and trajectory float64 [turns]."""
Advantage = Callable[[Sequence[ScoredGroup]], Advantages]
BUILT_IN = BuiltIn()
"""Built-in advantages by name."""


@BUILT_IN.add(
    "(return - mean) / standard deviation of the group",
    "the default",
)
def grpo(groups: Sequence[ScoredGroup]) -> Advantages:
    """A_it = (r_i - past_it - mean(r)) / (s + 1e-6).

    DeepSeekMath (arXiv 2402.03300, section 4.1.2). s is the larger of two numbers. One is std(r) with n - 1, as in verl
    and TRL (the paper does not say which). The other is the spread of the turns, sqrt(sum_i mean_t (r_i - past_it -
    mean(r))^2 / (n - 1)). The two numbers are equal if every past_it is 0. The process supervision of GRPO takes the
    deviation of all rewards likewise (section 4.1.3). With std(r) alone, nearly equal rewards would blow up different
    turns a million times.
    """
    advantages = []
    for group in groups:
        centred = _centred(group)
        advantages.append(_scaled(_less_past(centred, group), _std(centred)))
    return advantages


@BUILT_IN.add(
    "return - mean of the group",
    'no bias to very easy and very hard prompts; with `aggregation = "constant"`',
)
def dr_grpo(groups: Sequence[ScoredGroup]) -> Advantages:
    """A_it = r_i - past_it - mean(r). The standard deviation would favour very easy and very hard prompts.

    Dr. GRPO (arXiv 2503.20783, section 3.2).
    """
    return [_less_past(_centred(group), group) for group in groups]


@BUILT_IN.add(
    "return - mean of the others of the group",
    "small groups",
)
def rloo(groups: Sequence[ScoredGroup]) -> Advantages:
    """A_it = n / (n - 1) * (r_i - mean(r)) - past_it.

    If past_it is 0, this is r_i minus the mean of the other n - 1 rewards. REINFORCE leave-one-out (arXiv 2402.14740,
    section 3.3).
    """
    return [
        [
            centred * (len(group.rewards) / (len(group.rewards) - 1)) - past
            for centred, past in zip(_centred(group), group.past, strict=True)
        ]
        for group in groups
    ]


@BUILT_IN.add(
    "return - mean of the step",
    "rewards that compare across prompts; with `dynamic_sampling = false`",
)
def reinforce(groups: Sequence[ScoredGroup]) -> Advantages:
    """A_it = r_i - past_it - mean of all rewards of the step: REINFORCE with the batch's mean for a baseline.

    Williams 1992, section 4. REINFORCE++ (arXiv 2501.03262) takes the batch's mean too, and divides by the standard
    deviation. Groups may have a single trajectory.
    """
    baseline = float(np.mean(np.concatenate([_finite_rewards(group) for group in groups])))
    return [
        [reward - baseline - past for reward, past in zip(group.rewards, group.past, strict=True)] for group in groups
    ]


def has_signal(group: Group, config: LearnerConfig) -> bool:
    """Whether the signals of the trajectories differ by more than ``learner.signal_tolerance``.

    If the signal is the reward, a difference between the returns of turns is enough.
    """
    values = _signals(group, config.signal)
    if _spread(values) > config.signal_tolerance:
        return True
    if config.signal != REWARD:
        return False
    pasts = [turns_past(trajectory) for trajectory in group.trajectories]
    if not any(past.any() for past in pasts):
        return False
    returns = np.concatenate([value - past for value, past in zip(values, pasts, strict=True)])
    return _spread(returns) > config.signal_tolerance


def _signals(group: Group, signal: str) -> np.ndarray:
    """Signal of each trajectory: float64 [n].

    A trajectory that lacks the component has its reward before the overlong penalty as its signal. Raises ConfigError
    if all trajectories lack the component. A group is excused if the scoring of a trajectory ran out of time: the
    reward of that trajectory has only the component ``timed_out``.
    """
    values = []
    for trajectory in group.trajectories:
        components = trajectory.components
        unshaped = float(trajectory.reward or 0.0) - components.get(PENALTY_COMPONENT, 0.0)
        values.append(unshaped if signal == REWARD else components.get(signal, unshaped))
    named = {name for trajectory in group.trajectories for name in trajectory.components}
    excused = TIMED_OUT_COMPONENT in named
    if signal != REWARD and signal not in named and not excused:
        given = f"components {', '.join(sorted(named))}" if named else "no components"
        raise ConfigError([f'learner.signal: is "{signal}", but the rewards of group {group.lease.uid} have {given}'])
    return np.array(values)


def _spread(values: np.ndarray) -> float:
    return float(values.max() - values.min())


def _less_past(centred: np.ndarray, group: ScoredGroup) -> list[np.ndarray]:
    """The centred return of each turn: float64 [turns] for each trajectory."""
    return [value - past for value, past in zip(centred, group.past, strict=True)]


def _scaled(returns: list[np.ndarray], std: float) -> list[np.ndarray]:
    """Divide centred returns, [turns] for each trajectory, by s of ``grpo``; ``std`` is that of the rewards."""
    mean_squares = np.array([(values**2).sum() / len(values) if len(values) else 0.0 for values in returns])
    s = max(std, float(np.sqrt(mean_squares.sum() / (len(returns) - 1))))
    return [values / (s + STD_EPSILON) for values in returns]


def _std(centred: np.ndarray) -> float:
    return float(np.sqrt(np.sum(centred**2) / (len(centred) - 1)))


def _centred(group: ScoredGroup) -> np.ndarray:
    """Rewards less their mean, float64 [n]; exactly 0 if all are equal. Raises ValueError for fewer than 2."""
    values = _finite_rewards(group)
    if len(values) < 2:
        raise ValueError(f"group {group.uid} has {len(values)} trajectories; this advantage needs at least 2")
    if np.all(values == values[0]):
        # The mean of equal numbers may differ from them in the last bit.
        return np.zeros_like(values)
    centred: np.ndarray = values - values.mean()
    return centred


def _finite_rewards(group: ScoredGroup) -> np.ndarray:
    values = np.asarray(group.rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {values.tolist()} in group {group.uid}")
    return values


def checked(name: str, function: Callable[..., Any]) -> Advantage:
    """Wrap a ``function``, so that its errors and unusable results raise ConfigError.

    ``name`` is that of the advantage, for the error. The wrapper returns one float64 [turns] for each trajectory.
    """

    def advantage(groups: Sequence[ScoredGroup]) -> Advantages:
        try:
            returned = function(groups=groups)
            if len(returned) != len(groups):
                raise ValueError(f"it returned advantages of {len(returned)} groups, of {len(groups)} given")
            return [_by_turn(group, values) for group, values in zip(groups, returned, strict=True)]
        except Exception as error:
            raise ConfigError([f"learner.advantage: {name} failed: {describe(error)}"]) from error

    return advantage


def _by_turn(group: ScoredGroup, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Check a group's advantages, one number or [turns] for each trajectory, and expand each to float64 [turns].

    Raises ValueError.
    """
    if len(values) != len(group.rewards):
        of = f"for the {len(group.rewards)} trajectories of group {group.uid}"
        raise ValueError(f"it returned {len(values)} advantages {of}")
    arrays = [np.asarray(value, dtype=np.float64) for value in values]
    for each, past in zip(arrays, group.past, strict=True):
        if each.shape not in ((), past.shape):
            of = f"shape {each.shape} for a trajectory of {len(past)} turns in group {group.uid}"
            raise ValueError(f"it returned an advantage of {of}; it must be one number, or one for each turn")
    if not np.isfinite(np.concatenate([each.reshape(-1) for each in arrays])).all():
        raise ValueError(f"it returned an advantage that is not finite for group {group.uid}")
    return [each if each.ndim else np.full(past.shape, each) for each, past in zip(arrays, group.past, strict=True)]

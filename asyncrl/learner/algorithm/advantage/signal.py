"""Dynamic sampling: the choice of the groups that tell anything apart, and are trained.

DAPO (arXiv 2503.14476, section 3.2) leaves out prompts whose answers are all right or all wrong. That is judged by
``learner.signal``: by the reward as it was before the overlong penalty, so that one right answer that is a little long
does not make a group of right answers count, or by a component of it. Pure.

Fails with ConfigError where no trajectory of a group has the component, but for those whose scoring ran over its time.
"""

from __future__ import annotations

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.groups import Group, Trajectory
from asyncrl.messages.reward import PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.trajectories import past_rewards

REWARD = "reward"


def has_signal(group: Group, config: LearnerConfig) -> bool:
    """Whether trajectories of the group differ by more than ``learner.signal_tolerance``, or, under the signal of the
    reward, the returns of their turns.
    """
    values = _values(group, config.signal)
    if _spread(values) > config.signal_tolerance:
        return True
    if config.signal != REWARD:
        return False
    past = [turns_past(trajectory) for trajectory in group.trajectories]
    if not any(turns.any() for turns in past):
        return False
    returns = np.concatenate([value - turns for value, turns in zip(values, past, strict=True)])
    return _spread(returns) > config.signal_tolerance


def turns_past(trajectory: Trajectory) -> np.ndarray:
    """Rewards earned before each turn: float64 [turns], over all sequences of the trajectory."""
    return np.concatenate([past_rewards(sequence)[0] for sequence in trajectory.sequences])


def _values(group: Group, signal: str) -> np.ndarray:
    """Signal of each trajectory: float64 [n]. A trajectory without the component has its reward in its place."""
    found = []
    for trajectory in group.trajectories:
        components = trajectory.components
        unshaped = float(trajectory.reward or 0.0) - components.get(PENALTY_COMPONENT, 0.0)
        found.append(unshaped if signal == REWARD else components.get(signal, unshaped))
    named = {name for trajectory in group.trajectories for name in trajectory.components}
    if signal != REWARD and signal not in named and TIMED_OUT_COMPONENT not in named:
        told = f"components {', '.join(sorted(named))}" if named else "no components"
        raise ConfigError([f'learner.signal: is "{signal}", but the rewards of group {group.lease.uid} have {told}'])
    return np.array(found)


def _spread(values: np.ndarray) -> float:
    return float(values.max() - values.min())

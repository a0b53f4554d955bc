"""Checks of a delivered group: can it be trained, and do its rewards differ? Pure.

``check_group`` checks everything that build_step relies on. A group that fails is quarantined with the reason.

``has_signal`` is dynamic sampling: DAPO (arXiv 2503.14476, section 3.2) leaves out prompts whose answers are all right
or all wrong. ``learner.signal`` names the number that is compared: a component, or the reward before the overlong
penalty. With the penalty, one slightly long right answer would make a group of right answers differ. ``has_signal``
raises ConfigError if no trajectory has the component and no scoring ran out of time.
"""

from __future__ import annotations

import math

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.messages.groups import Group, Sequence, Trajectory
from asyncrl.messages.reward import PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.messages.trajectories import past_rewards, sampled_positions, sampled_spans

REWARD = "reward"
ABOVE_ZERO = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""


def check_group(group: Group) -> str | None:
    """Check that a group can be trained. Returns None if it can, else the reason, first its own ``failure``."""
    if group.failure is not None:
        return group.failure
    if len(group.trajectories) < 2:
        return f"{len(group.trajectories)} trajectories; an advantage needs at least 2"
    if not len(group.lease.prompt_ids):
        return "the prompt is empty; its first response token has nothing to be predicted from"
    for trajectory in group.trajectories:
        if problem := _check_trajectory(trajectory):
            return f"sample {trajectory.sample}: {problem}"
    return None


def _check_trajectory(trajectory: Trajectory) -> str | None:
    if not trajectory.sequences:
        return "no sequences"
    for number, sequence in enumerate(trajectory.sequences):
        problem = _check_tokens(sequence) or _check_logprobs(sequence) or _check_turns(sequence)
        if problem:
            return f"sequence {number}: {problem}" if len(trajectory.sequences) > 1 else problem
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return f"the reward is {trajectory.reward}"
    return None


def _check_tokens(sequence: Sequence) -> str | None:
    count, spans = len(sequence.tokens), sequence.spans
    if not count:
        return "no tokens"
    if sequence.prompt_ids is not None and not len(sequence.prompt_ids):
        return "its prompt is empty; its first token has nothing to be predicted from"
    # The ends of the previous spans: the first span begins at 0, and each other one at the end of the previous one.
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != count or any(s.start != end or s.end <= s.start for s, end in zip(spans, ends, strict=False)):
        return f"version spans do not cover its {count} tokens: {[(s.start, s.end) for s in spans]}"
    for span in spans:
        if (span.role == "sampled") != (span.version >= 0):
            return f"tokens {span.start} to {span.end} are {span.role} and of version {span.version}"
    if spans[0].role == "context":
        return "its first token is context, which belongs to its prompt"
    return None


def _check_logprobs(sequence: Sequence) -> str | None:
    sampled = sum(span.end - span.start for span in sampled_spans(sequence))
    if len(sequence.logprobs) != sampled:
        return f"{sampled} sampled tokens, {len(sequence.logprobs)} log-probs"
    # Written so that NaN fails, too.
    if sampled and not (sequence.logprobs.min() > -np.inf and sequence.logprobs.max() <= ABOVE_ZERO):
        return "a log-prob is not finite or above 0"
    return None


def _check_turns(sequence: Sequence) -> str | None:
    """Check that the turns are the sampled tokens, in order."""
    if not sequence.turns:
        return None
    places = [(turn.start, turn.end) for turn in sequence.turns]
    covered = np.concatenate([np.arange(start, end) for start, end in places])
    if any(end <= start for start, end in places) or not np.array_equal(covered, sampled_positions(sequence)):
        return f"its turns {places} are not its sampled tokens, in order"
    if not all(math.isfinite(turn.past_reward) for turn in sequence.turns):
        return "the past reward of a turn is not finite"
    return None


def has_signal(group: Group, config: LearnerConfig) -> bool:
    """Whether the signals of the trajectories differ by more than ``learner.signal_tolerance``.

    If the signal is the reward, a difference between the returns of turns (advantages.py) is enough.
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


def turns_past(trajectory: Trajectory) -> np.ndarray:
    """Reward that a trajectory had earned before each of its turns: float64 [turns], over all its sequences."""
    return np.concatenate([past_rewards(sequence)[0] for sequence in trajectory.sequences])


def _signals(group: Group, signal: str) -> np.ndarray:
    """Signal of each trajectory: float64 [n].

    A trajectory that lacks the component has its reward before the overlong penalty as its signal. Raises ConfigError
    if all trajectories lack the component, unless the scoring of one ran out of time.
    """
    values = []
    for trajectory in group.trajectories:
        components = trajectory.components
        unshaped = float(trajectory.reward or 0.0) - components.get(PENALTY_COMPONENT, 0.0)
        values.append(unshaped if signal == REWARD else components.get(signal, unshaped))
    named = {name for trajectory in group.trajectories for name in trajectory.components}
    if signal != REWARD and signal not in named and TIMED_OUT_COMPONENT not in named:
        given = f"components {', '.join(sorted(named))}" if named else "no components"
        raise ConfigError([f'learner.signal: is "{signal}", but the rewards of group {group.lease.uid} have {given}'])
    return np.array(values)


def _spread(values: np.ndarray) -> float:
    return float(values.max() - values.min())

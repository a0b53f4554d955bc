"""The check that a delivered group can be trained: everything that build_step relies on. Pure.

A group that fails is quarantined with the reason; nothing here raises.
"""

from __future__ import annotations

import math

import numpy as np

from asyncrl.messages.groups import Group, Sequence, Trajectory
from asyncrl.trajectories import sampled_positions, sampled_spans

ABOVE_ZERO = 1e-3
"""Nats by which a log-prob may exceed 0; it does so by rounding only."""


def check_group(group: Group) -> str | None:
    """Reason that a delivered group cannot be trained (and is quarantined), or None.

    ``failure`` itself comes first.
    """
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
    # Each span begins where the one before it ends, and the first at 0.
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
    # NaN is neither.
    if sampled and not (sequence.logprobs.min() > -np.inf and sequence.logprobs.max() <= ABOVE_ZERO):
        return "a log-prob is not finite or above 0"
    return None


def _check_turns(sequence: Sequence) -> str | None:
    if not sequence.turns:
        return None
    places = [(turn.start, turn.end) for turn in sequence.turns]
    covered = np.concatenate([np.arange(start, end) for start, end in places])
    if any(end <= start for start, end in places) or not np.array_equal(covered, sampled_positions(sequence)):
        return f"its turns {places} are not its sampled tokens, in order"
    if not all(math.isfinite(turn.past_reward) for turn in sequence.turns):
        return "the past reward of a turn is not finite"
    return None

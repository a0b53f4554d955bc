"""Checks that a group can be trained, and computes lengths, versions and rewards of groups and trajectories. Pure.

``check_group`` checks everything that a plan of a step relies on (learner/algorithm/batch.py). A group that fails is
quarantined with the reason.

All other functions consider tokens of role ``sampled`` only, in the order of ``Sequence.logprobs``, and leave out
context and repeated tokens. They expect sequences that have passed ``check_group``, and then do not fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from asyncrl.messages import FinishReason
from asyncrl.messages.groups import Group, Sequence, Trajectory, VersionSpan

TRUNCATED: frozenset[FinishReason] = frozenset({"length", "turns", "time"})
"""Finish reasons of trajectories that a limit ended: of tokens, turns or time."""
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


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a limit ended the trajectory."""
    return trajectory.finish_reason in TRUNCATED


def sampled_tokens(trajectory: Trajectory) -> int:
    """Length of the trajectory: the number of its sampled tokens."""
    return sum(len(sequence.logprobs) for sequence in trajectory.sequences)


def last_answer_tokens(trajectory: Trajectory) -> int:
    """Length of the last answer, in sampled tokens; 0 if the trajectory does not end in one."""
    tokens = 0
    for span in reversed(trajectory.sequences[-1].spans if trajectory.sequences else ()):
        if span.role != "sampled":
            break
        tokens += span.end - span.start
    return tokens


def sampled_spans(sequence: Sequence) -> Iterator[VersionSpan]:
    """Yield the spans of role ``sampled``."""
    return (span for span in sequence.spans if span.role == "sampled")


def sampled_positions(sequence: Sequence) -> np.ndarray:
    """Positions of the sampled tokens in ``tokens``: int64 [S]."""
    if len(sequence.logprobs) == len(sequence.tokens):
        return np.arange(len(sequence.tokens))
    # The empty array is for a sequence without sampled spans: numpy cannot concatenate an empty list.
    return np.concatenate([np.arange(0), *(np.arange(span.start, span.end) for span in sampled_spans(sequence))])


def versions_of(trajectory: Trajectory) -> list[int]:
    """The version of each sampled span, in order."""
    return [span.version for sequence in trajectory.sequences for span in sampled_spans(sequence)]


def oldest_version(group: Group) -> int | None:
    """Version of the group's oldest sampled token; None if it has no sampled token."""
    return min((version for trajectory in group.trajectories for version in versions_of(trajectory)), default=None)


def is_late(group: Group, version: int, limit: int) -> bool:
    """Whether a token of the group is staler than ``limit`` when it is trained at ``version``."""
    oldest = oldest_version(group)
    return oldest is not None and version - oldest > limit


def past_rewards(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return ``Turn.past_reward`` and the length of each answer of a sequence: float64 [answers], int64 [answers].

    The lengths sum to S. A sequence without turns is one answer with past reward 0.
    """
    if not sequence.turns:
        sampled = len(sequence.logprobs)
        answers = 1 if sampled else 0
        return np.zeros(answers), np.full(answers, sampled, np.int64)
    return (
        np.array([turn.past_reward for turn in sequence.turns], np.float64),
        np.array([turn.end - turn.start for turn in sequence.turns], np.int64),
    )


def turns_past(trajectory: Trajectory) -> np.ndarray:
    """Reward that a trajectory had earned before each of its turns: float64 [turns], over all its sequences."""
    return np.concatenate([past_rewards(sequence)[0] for sequence in trajectory.sequences])


def rewards_of(group: Group) -> np.ndarray:
    """Rewards of the scored trajectories, in order: float64 [n]."""
    return np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64)

"""Figures of a trajectory, or a group of them, that follow from its sequences alone. Pure.

They speak of sampled tokens, in the order of ``Sequence.logprobs``: context, and tokens repeated from an earlier
sequence, are in none of them. They rely on the checks of learner/algorithm/group_check.py, and fail in no
other way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncrl.messages import FinishReason
from asyncrl.messages.groups import Group, Sequence, Trajectory, VersionSpan

TRUNCATED: frozenset[FinishReason] = frozenset({"length", "turns", "time"})
"""Ends that a limit brought about: of tokens, turns or time."""


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a limit ended the trajectory."""
    return trajectory.finish_reason in TRUNCATED


def sampled_tokens(trajectory: Trajectory) -> int:
    """Length of the trajectory: the tokens of it that the policy sampled."""
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
    """The spans of role ``sampled``."""
    return (span for span in sequence.spans if span.role == "sampled")


def sampled_positions(sequence: Sequence) -> np.ndarray:
    """Positions of the sampled tokens in ``tokens``: int64 [S]."""
    if len(sequence.logprobs) == len(sequence.tokens):
        return np.arange(len(sequence.tokens))
    # The empty array is for a sequence without sampled spans: nothing cannot be concatenated.
    return np.concatenate([np.arange(0), *(np.arange(span.start, span.end) for span in sampled_spans(sequence))])


def versions_of(trajectory: Trajectory) -> list[int]:
    """The version of each sampled span, in order."""
    return [span.version for sequence in trajectory.sequences for span in sampled_spans(sequence)]


def oldest_version(group: Group) -> int | None:
    """Version of the group's oldest sampled token; None where it has none."""
    return min((version for trajectory in group.trajectories for version in versions_of(trajectory)), default=None)


def is_late(group: Group, version: int, limit: int) -> bool:
    """Whether a token of the group is staler than ``limit`` when it is trained at ``version``."""
    oldest = oldest_version(group)
    return oldest is not None and version - oldest > limit


def past_rewards(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """``Turn.past_reward`` and length of each answer in it: float64 [answers] and int64 [answers], which sums to S."""
    if not sequence.turns:
        sampled = len(sequence.logprobs)
        answers = 1 if sampled else 0
        return np.zeros(answers), np.full(answers, sampled, np.int64)
    return (
        np.array([turn.past_reward for turn in sequence.turns], np.float64),
        np.array([turn.end - turn.start for turn in sequence.turns], np.int64),
    )

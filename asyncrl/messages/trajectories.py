"""Computes lengths, versions and rewards of a trajectory or group from its sequences. Pure.

All functions consider tokens of role ``sampled`` only, in the order of ``Sequence.logprobs``, and leave out context and
repeated tokens. They expect sequences that have passed learner/algorithm/group_check.py, and then do not fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncrl.messages import FinishReason
from asyncrl.messages.groups import Group, Sequence, Trajectory, VersionSpan

TRUNCATED: frozenset[FinishReason] = frozenset({"length", "turns", "time"})
"""Finish reasons of trajectories that a limit ended: of tokens, turns or time."""


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

"""The learner's log-probs and entropies of the tokens that samples/ shows, as a step computes them. Pure.

Each rank picks the values of these tokens in its own micro-batches; rank 0 sorts them by sequence. Invariant: a step
computes nothing in addition, and each value is of the weights with which its update was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.learner.algorithm.batch import SequenceId, StepPlan
from asyncrl.learner.algorithm.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Values of a sequence's sampled tokens: float32 [S] each, nats; NaN for a token without a loss."""

    logprobs: np.ndarray
    entropies: np.ndarray


def recorded_targets(batches: Sequence[MicroBatch], recorded: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the targets of the first ``recorded`` sequences of an update in some of its micro-batches.

    Returns which of all N targets these are, bool [N], and the index of the sequence of each: int32 [M].
    """
    sequences = np.concatenate([np.empty(0, np.int32), *(batch.sequences[batch.segments] for batch in batches)])
    chosen = (sequences >= 0) & (sequences < recorded)
    return chosen, sequences[chosen]


def count_recorded(plan: StepPlan) -> list[int]:
    """Number of targets that each row group has of recorded sequences, over all updates."""
    return [
        sum(len(recorded_targets(update.ranks[group], len(update.recorded))[1]) for update in plan.updates)
        for group in range(len(plan.updates[0].ranks))
    ]


def by_sequence(plan: StepPlan, values: Sequence[np.ndarray]) -> dict[SequenceId, TokenScores]:
    """Sort by sequence what the row groups have picked.

    ``values`` has for each row group float32 [2, M], update by update: log-probs and entropies of its recorded targets.
    """
    found: dict[SequenceId, TokenScores] = {}
    for group, picked in enumerate(values):
        start = 0
        for update in plan.updates:
            _, sequences = recorded_targets(update.ranks[group], len(update.recorded))
            part = picked[:, start : start + len(sequences)]
            start += len(sequences)
            for index in np.unique(sequences):
                has_loss = update.recorded[index]
                scores = np.full((2, len(has_loss)), np.nan, np.float32)
                scores[:, has_loss] = part[:, sequences == index]
                found[update.sequences[index]] = TokenScores(*scores)
    return found

"""Weights of token losses in the loss of a step: one for each token, and one denominator for the whole step.

loss = (1 / denominator) * sum over all tokens of the step of weight * token loss. Both are known before
anything is computed, so the gradient does not depend on how the step is cut into micro-batches and ranks.

The unit is the trajectory, in however many sequences it comes: a fork of its conversation changes no weight. Context,
tokens that are too late to be trained (``staleness.late``), and all tokens of a masked trajectory have no weight and
count in no denominator; a trajectory without a loss token counts in none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]


def token_weight(aggregation: Aggregation, loss_tokens: int) -> float:
    """Weight of each loss token of a trajectory that has ``loss_tokens`` of them (at least 1).

    token, constant: 1. sequence: 1 / loss_tokens, so that a trajectory counts by its mean.
    """
    return 1.0 / loss_tokens if aggregation == "sequence" else 1.0


def step_denominator(aggregation: Aggregation, loss_tokens: Sequence[int], max_tokens: int) -> float:
    """Denominator of the step's weighted sum; ``loss_tokens`` holds one count (>= 1) for each trajectory.

    token: all loss tokens (DAPO, arXiv 2503.14476, eq. 12). sequence: trajectories (GRPO, arXiv 2402.03300, eq.
    3). constant: trajectories * max_tokens (Dr. GRPO, arXiv 2503.20783, section 3.2). 1 for a step without
    any.
    """
    if not loss_tokens:
        return 1.0
    if aggregation == "token":
        return float(sum(loss_tokens))
    if aggregation == "sequence":
        return float(len(loss_tokens))
    return float(len(loss_tokens) * max_tokens)

"""The tokens of a micro-batch as a loss sees them, and sums over each sequence.

There is one entry for each token that has a loss, and none for context. Tokens of a sequence are side by side.
Invariant: only ``logprobs`` and ``entropies`` have a gradient, so a value made of the others is a constant.

A number that is not finite stays so, and the step that it reaches is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats: exp(20) still squares within float32."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N tokens of S sequences. Log-probs are in nats, of the sampled token at the temperature of sampling."""

    logprobs: Tensor
    """Log-prob under the weights that are trained: float32 [N], with a gradient."""
    entropies: Tensor
    """Entropy, nats: float32 [N]; with a gradient under the loss's ``entropy_gradient`` or an entropy bonus."""
    behaviour: Tensor
    """Log-prob as the engine reported it, under the version that sampled the token: float32 [N]."""
    proximal: Tensor
    """Log-prob under the weights before the first update from this batch, in which it is ``logprobs``: float32 [N]."""
    advantages: Tensor
    """Advantage: float32 [N]."""
    weights: Tensor
    """Share in the sum that is divided by the step's denominator (batch.py): float32 [N]; 0 in a filler."""
    segments: Tensor
    """Sequence of each token: int64 [N], ascending from 0."""
    sequences: int
    """Number of sequences, S."""
    staleness: Tensor
    """Staleness, versions: int32 [N]; -1 where the engine's log-prob is of no single version."""
    reference: Tensor | None = None
    """Log-prob under the frozen reference, where the loss says ``reference`` or a KL is set: float32 [N]."""
    teacher: Tensor | None = None
    """Log-prob under the teacher, where the loss says ``teacher``: float32 [N]."""

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sum of ``values`` over each token's sequence: [N] -> [N]."""
        return values.new_zeros(self.sequences).index_add(0, self.segments, values)[self.segments]

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """Mean of ``values`` over each token's sequence: [N] -> [N]."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(values.detach().new_ones(len(values)))

    def max_by_sequence(self, values: Tensor) -> Tensor:
        """Largest of ``values`` in each token's sequence, without a gradient: [N] -> [N]."""
        largest = values.detach().new_full((self.sequences,), float("-inf"))
        return largest.scatter_reduce(0, self.segments, values.detach(), "amax")[self.segments]


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log of new / old for two log-probs, clamped to +-20. Keeps NaN."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

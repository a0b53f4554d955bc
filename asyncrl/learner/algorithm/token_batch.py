"""The tokens of a micro-batch as a loss sees them, and sums over each sequence.

One entry for each token that has a loss; context is not among them. Tokens of a sequence are side by side. It keeps:
no tensor but ``logprobs`` and ``entropies`` has a gradient, so that whatever a loss makes of the others is a constant.

Fails with nothing: what is not finite stays so, and the step that it reaches is refused.
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
    """float32 [N], with a gradient: under the weights that are trained."""
    entropies: Tensor
    """float32 [N], nats; with a gradient where the loss says ``entropy_gradient`` or an entropy bonus is set."""
    behaviour: Tensor
    """float32 [N]: as the engine reported it, under the version that sampled the token."""
    proximal: Tensor
    """float32 [N]: under the weights before the first update from this batch; in that update ``logprobs`` itself."""
    advantages: Tensor
    """float32 [N]."""
    weights: Tensor
    """float32 [N]: share in the sum that is divided by the step's denominator (aggregation.py); 0 in a filler."""
    segments: Tensor
    """int64 [N], ascending from 0: the sequence of each token."""
    sequences: int
    """S."""
    staleness: Tensor
    """int32 [N], versions; -1 where the engine's log-prob is of no single version."""
    reference: Tensor | None = None
    """float32 [N]: under the frozen reference, where the loss says ``reference`` or a KL is set."""
    teacher: Tensor | None = None
    """float32 [N]: under the teacher, where the loss says ``teacher``."""

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[N] -> [N]: at each token the sum of ``values`` over its sequence."""
        return values.new_zeros(self.sequences).index_add(0, self.segments, values)[self.segments]

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """[N] -> [N]: at each token the mean of ``values`` over its sequence."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(values.detach().new_ones(len(values)))

    def max_by_sequence(self, values: Tensor) -> Tensor:
        """[N] -> [N]: at each token the largest of ``values`` in its sequence; without a gradient."""
        largest = values.detach().new_full((self.sequences,), float("-inf"))
        return largest.scatter_reduce(0, self.segments, values.detach(), "amax")[self.segments]


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log of new / old for two log-probs, clamped to +-20. Keeps NaN."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

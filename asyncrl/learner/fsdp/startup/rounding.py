"""Measures the rounding of a model: the bound within which two computations of one log-prob count as equal.

Two mathematically equal computations differ by rounding; how much depends on the model, its device and its compute
type. ``measure_rounding`` scores the same rows again with random rounding: the embeddings and the output of each
decoder layer change by one unit in the last place, up or down at random. This is Monte Carlo arithmetic (Parker,
Pierce, Eggert, Computing in Science and Engineering 2(4), 2000). The measurement uses one sequence a row, so a leak
between packed sequences cannot raise the bound.

The bound of a position is MARGIN times the largest of three numbers: its measured difference, the root mean square of
these differences, and one unit in the last place of the log-prob. For SmolLM2-135M-Instruct in float32 on a CPU, ways
of scoring differed by at most 3 times that number (five seeds with AVX2, four with AVX-512). No GPU was measured.

If a score is not finite, with random rounding or without, no position has a bound, and nothing agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Policy

MARGIN = 8.0
"""Factor from the measured rounding to the bound."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Difference between two computations of the same log-probs."""

    nats: float
    """Largest difference of a log-prob."""
    ratio: float
    """Largest quotient of a difference and its bound: up to 1 the computations agree."""

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference. False for a ratio that is not a number."""
        return self.ratio <= 1.0

    def __str__(self) -> str:
        return f"{self.nats:.2g} nats, {self.ratio:.2g} times the bound from measured rounding"


def score_rows(policy: Policy, rows: Sequence[PackedRow]) -> Tensor:
    """Score rows without a gradient. Returns the log-probs of all positions, float32, row after row."""
    with torch.no_grad():
        return torch.cat([policy.score(row, 1.0)[0] for row in rows])


def measure_rounding(policy: Policy, rows: Sequence[PackedRow], scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Score ``rows`` with random rounding, and return the bound of each position, float32, nats.

    ``rows`` hold one sequence each, and ``scores`` are their log-probs without random rounding. ``dtype`` is the
    compute type, whose last place is changed. If a score is not finite, all bounds are NaN.
    """
    with _random_rounding(policy, dtype):
        differences = (score_rows(policy, rows) - scores).abs()
    if not differences.isfinite().all():
        return torch.full_like(scores, torch.nan)
    unit = torch.finfo(dtype).eps
    typical = differences.square().mean().sqrt()
    return MARGIN * torch.maximum(torch.maximum(differences, typical), unit * scores.abs().clamp_min(1.0))


def distance(scores: Tensor, expected: Tensor, bounds: Tensor) -> Distance:
    """Compare log-probs with those expected and with the bounds, all float32 [N], nats."""
    differences = (scores - expected).abs()
    return Distance(float(differences.max()), float((differences / bounds).max()))


@contextmanager
def _random_rounding(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """Context in which the embeddings and each layer's output are changed by one unit in the last place, at random.

    Its hooks run outside of the compiled code, which is the ``forward`` of a layer.
    """
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps

    def rounded(values: Tensor) -> Tensor:
        signs = torch.randint(0, 2, values.shape, generator=generator).to(values.device) * 2 - 1
        return (values + values * (unit * signs)).to(values.dtype)

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (rounded(output[0]), *output[1:])
        return rounded(output)

    modules = [policy.model.get_input_embeddings(), *policy.decoder_layers()]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

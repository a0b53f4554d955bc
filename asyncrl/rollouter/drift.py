"""How far an engine is from the learner under the same weights: both score the same fixed sequences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.messages.weights import Probe

TOLERANCE = 0.1
"""Mean distance (nats) beyond which two sets of weights are not the same. Rounding makes about a hundredth in bfloat16
and a millionth in float32; one layer of another version, or a stale packed copy of one, several tenths."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Over all tokens of a probe but the first of each sequence."""

    kl: float
    """Mean of r - 1 - log r (nats), r the engine's probability over the learner's: the estimator k3 of the divergence
    (http://joschu.net/blog/kl-approx.html), which errors of opposite sign do not cancel in."""
    distance: float
    """Mean of the log-probs' absolute difference (nats)."""

    @property
    def agrees(self) -> bool:
        """Whether it can be the same weights."""
        return self.distance <= TOLERANCE

    def __str__(self) -> str:
        return f"their log-probs are {self.distance:.3g} nats apart on average (at most {TOLERANCE} is rounding)"


def measure_drift(probe: Probe, scores: Sequence[Sequence[float]]) -> Drift:
    """Compare ``scores``, for each sequence the engine's log-probs of its tokens but the first, with the probe's."""
    difference = np.array(scores, np.float64) - probe.logprobs.astype(np.float64)
    return Drift(
        kl=float((np.expm1(difference) - difference).mean()),
        distance=float(np.abs(difference).mean()),
    )

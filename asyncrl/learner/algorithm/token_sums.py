"""Statistics of the tokens of an update: the distance of the policy from the one that sampled them.

Each micro-batch gives the sums of its tokens. The sums of all micro-batches and ranks give the metrics ``policy/*``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asyncrl.learner.algorithm.losses import TokenBatch, log_ratio


@dataclass
class TokenSums:
    """Sums over loss tokens; r = pi_theta / pi_behaviour, not truncated. In the order of ``token_sums``.

    A fresh token was sampled by the very weights that are being trained.
    """

    count: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    kl: float = 0.0
    """Sum of r - 1 - log r."""
    clipped: float = 0.0
    """Number of tokens with r above the cap."""
    entropy: float = 0.0
    fresh_count: float = 0.0
    """Number of fresh tokens."""
    fresh_kl: float = 0.0
    """Sum of r - 1 - log r over the fresh tokens."""
    ratio_max: float = 0.0
    """The largest r, not a sum."""

    def add(self, other: TokenSums) -> None:
        """Add the sums of another, disjoint set of tokens."""
        for item in fields(self):
            own, added = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(own, added) if item.name == "ratio_max" else own + added)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of these sums; empty without tokens. theta is the policy that is trained.

        ``policy/behaviour_kl``: KL(behaviour || theta) by the k3 estimator mean(r - 1 - log r)
        (http://joschu.net/blog/kl-approx.html). ``policy/ess``: (sum r)^2 / (n sum r^2), the effective share of the
        sample, 1 on policy (Kong 1992). ``policy/engine_kl``: the same KL over fresh tokens, which shows how far engine
        and trainer differ. ``policy/engine_kl_tokens`` is their number. Both are absent without fresh tokens, as after
        the first update of a step.
        """
        if not self.count:
            return {}
        metrics = {
            "policy/entropy": self.entropy / self.count,
            "policy/ess": self.ratio**2 / (self.count * self.ratio_squared),
            "policy/behaviour_kl": self.kl / self.count,
            "policy/tis_clipped_fraction": self.clipped / self.count,
            "policy/ratio_max": self.ratio_max,
        }
        if self.fresh_count:
            metrics["policy/engine_kl"] = self.fresh_kl / self.fresh_count
            metrics["policy/engine_kl_tokens"] = self.fresh_count
        return metrics


def token_sums(batch: TokenBatch, *, fresh: bool, cap: float) -> Tensor:
    """Compute the fields of TokenSums for a micro-batch: float64 [9], left on the device.

    ``fresh``: whether the weights being trained are the newest published ones, so that tokens of staleness 0 come from
    them.
    """
    log_r = log_ratio(batch.logprobs.detach(), batch.behaviour).double()
    ratio = log_r.exp()
    kl = ratio - 1.0 - log_r
    real = (batch.weights > 0).double()
    new = real * (batch.staleness == 0) * fresh
    rows = [
        real,
        real * ratio,
        real * ratio**2,
        real * kl,
        real * (ratio > cap),
        real * batch.entropies.detach().double(),
        new,
        new * kl,
    ]
    # Ratios are above 0, so that the 0 of a filler is never the largest.
    return torch.cat([torch.stack(rows).sum(dim=1), (real * ratio).max().reshape(1)])

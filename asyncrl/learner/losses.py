"""The policy-gradient loss and the statistics that come with it: pure functions of tensors.

All tensors are [N], one entry for each loss token of a micro-batch, float32. Token losses are summed with
their weights and divided by the step's denominator (aggregation.py), so the losses of micro-batches add up to
the step's.

Statistics are sums, so that those of micro-batches and ranks add up as well; ``TokenSums.metrics`` divides at
the end. A token of weight 0 (a filler) is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats: exp(20) still squares within float32."""


def decoupled_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    denominator: float,
    cap: float,
) -> Tensor:
    """Decoupled policy gradient with a truncated importance weight, one update per batch. Returns a scalar.

    L = -(1 / D) sum_t weight_t * w_t * A_t * pi_theta(t) / sg(pi_theta(t)), w_t = sg(min(pi_theta(t) /
    pi_behaviour(t), C)).

    Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5) takes its ratio against a proximal policy, the weights
    before the first update from a batch. With one update per batch these are the current ones: the ratio is
    1, its clip never acts, and its gradient is that of log pi_theta. Truncation: IMPALA (arXiv 1802.01561);
    per token. ``behaviour`` is the log-prob that the engine reported, ``cap`` is C.
    """
    ratio = behaviour_log_ratio(logprobs, behaviour).exp()
    importance = ratio.clamp(max=cap)
    proximal_ratio = (logprobs - logprobs.detach()).exp()
    return -(weights * importance * advantages * proximal_ratio).sum() / denominator


def behaviour_log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """log pi_theta - log pi_behaviour, clamped to +-20, without a gradient. Keeps NaN."""
    return (logprobs.detach() - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass
class TokenSums:
    """Sums over loss tokens; r = pi_theta / pi_behaviour, not truncated. In the order of token_sums."""

    count: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    kl: float = 0.0
    """Of r - 1 - log r."""
    clipped: float = 0.0
    """Tokens with r > C."""
    entropy: float = 0.0
    fresh_count: float = 0.0
    """Tokens sampled by the very weights that are being trained."""
    fresh_kl: float = 0.0
    ratio_max: float = 0.0
    """The largest r, not a sum."""

    def add(self, other: TokenSums) -> None:
        """Put two disjoint sets of tokens together."""
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(ours, theirs) if item.name == "ratio_max" else ours + theirs)

    def metrics(self) -> dict[str, float]:
        """The means; empty without tokens.

        ``policy/behaviour_kl``: KL(behaviour || theta) by the k3 estimator mean(r - 1 - log r)
        (http://joschu.net/blog/kl-approx.html). ``policy/ess``: (sum r)^2 / (n sum r^2), the effective share
        of the sample, 1 on policy (Kong 1992). ``policy/engine_kl``: the same KL on the tokens of equal
        weights: how far engine and trainer drift apart; with its count, and absent without such tokens.
        """
        if not self.count:
            return {}
        found = {
            "policy/entropy": self.entropy / self.count,
            "policy/ess": self.ratio**2 / (self.count * self.ratio_squared),
            "policy/behaviour_kl": self.kl / self.count,
            "policy/tis_clipped_fraction": self.clipped / self.count,
            "policy/ratio_max": self.ratio_max,
        }
        if self.fresh_count:
            found["policy/engine_kl"] = self.fresh_kl / self.fresh_count
            found["policy/engine_kl_tokens"] = self.fresh_count
        return found


def token_sums(
    logprobs: Tensor, behaviour: Tensor, entropies: Tensor, weights: Tensor, fresh: Tensor, *, cap: float
) -> Tensor:
    """The fields of TokenSums for a micro-batch, float64, left on the device; ``fresh`` is bool [N]."""
    log_ratio = behaviour_log_ratio(logprobs, behaviour).double()
    ratio = log_ratio.exp()
    kl = ratio - 1.0 - log_ratio
    real = (weights > 0).double()
    new = real * fresh
    rows = [
        real,
        real * ratio,
        real * ratio**2,
        real * kl,
        real * (ratio > cap),
        real * entropies.detach().double(),
        new,
        new * kl,
    ]
    return torch.cat([torch.stack(rows).sum(dim=1), (real * ratio).max().reshape(1)])

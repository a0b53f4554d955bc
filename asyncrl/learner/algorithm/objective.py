"""The objective that is minimised: loss, off-policy correction, divergence from the reference, entropy bonus.

``token_sums`` gives the statistics of a step's tokens: the distance of the policy from the one that sampled them.

    objective = factor * loss + kl.coefficient * KL - entropy_bonus * H

for each token (KL only with kl.place = "loss"). The objective is weighted, summed and divided by the denominator of the
update. So the objectives of micro-batches add up to that of the update, and so do the named sums.

The factor (``correction``) is constant in the gradient. rho = pi_prox / pi_behaviour says how much likelier a token is
under the step's first weights than under the weights that sampled it. The factor is the product of

    weight    min(rho, cap) of the token; or of its sequence, min(product of rho, cap); or 1, as for a loss that
              corrects itself
    mask      0 for a token whose rho is outside [low, high], else 1
    reject    0 for all tokens of a sequence whose mean, sum or largest k exceeds a limit in size, else 1

Tokens of factor 0 stay in the denominator: a mask removes a gradient and does not raise those of other tokens.

Sources: truncated importance sampling, IMPALA (arXiv 1802.01561), for engines that differ from the trainer
https://fengyao.notion.site/off-policy-rl; mask, IcePop (arXiv 2510.18855); estimators k1, k2, k3
http://joschu.net/blog/kl-approx.html.

Fails with ConfigError if the loss would be corrected twice, lacks the teacher that it needs, or has one without need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionConfig, RejectConfig
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.losses import LOG_RATIO_LIMIT, Loss, TokenBatch, Traits, log_ratio

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r.square() / 2,
    "k3": lambda r: r.exp() - 1 - r,
}
"""Estimators on the log-ratio r = log(p / q) of a token sampled from q, nats; their mean is KL(q || p) (k2 nearly)."""


class Objective:
    """The objective of a run."""

    def __init__(self, config: LearnerConfig, loss: Loss, traits: Traits) -> None:
        self._loss, self.traits = loss, traits
        weight = config.correction.weight
        if self.traits.corrects and weight not in ("auto", "none"):
            problem = f'is "{weight}", but the loss {config.loss} corrects itself'
            raise ConfigError(
                [f"learner.correction.weight: {problem}: its ratio is against the engine's log-probs; set it to none"]
            )
        if self.traits.teacher and config.teacher is None:
            raise ConfigError([f"learner.teacher: the loss {config.loss} needs one; name the folder of its model"])
        if config.teacher is not None and not self.traits.teacher:
            raise ConfigError([f"learner.teacher: the loss {config.loss} asks for none; leave it out"])
        if weight == "auto":
            weight = "none" if self.traits.corrects else "token"
        self._correction = config.correction.model_copy(update={"weight": weight})
        self._kl = config.kl
        self._cap, self._entropy_bonus = config.tis_cap, config.entropy_bonus

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a sequence whose advantages are all 0 has no gradient and need not be computed."""
        return self.traits.multiple_of_advantage and not self._kl.in_loss and not self._entropy_bonus

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether a batch's entropies must have a gradient."""
        return self.traits.entropy_gradient or self._entropy_bonus > 0

    @property
    def needs_reference(self) -> bool:
        """Whether a batch must have the reference's log-probs."""
        return self.traits.reference or self._kl.in_loss

    def __call__(self, batch: TokenBatch, denominator: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The micro-batch's share of the objective, a scalar with a gradient, and named sums over its tokens."""
        values, sums = self._loss(batch=batch)
        factor, corrected = correction(batch, self._correction, self._cap)
        total = factor * values
        sums = {**sums, **corrected}
        if self._kl.in_loss:
            divergence = kl_losses(batch, self._kl.estimator_used, self._cap)
            total = total + self._kl.coefficient * divergence
            sums["reference_kl"] = (divergence.detach() * (batch.weights > 0)).sum()
        if self._entropy_bonus:
            total = total - self._entropy_bonus * batch.entropies
        return (batch.weights * total).sum() / denominator, sums


def kl_losses(batch: TokenBatch, estimator: str, cap: float) -> Tensor:
    """Divergence from the frozen reference in the loss, float32 [N] with a gradient, nats; see scoring.py too.

    With x = log(pi_ref / pi), a token sampled from pi gives the estimators k1 = -x, k2 = x^2 / 2 and k3 = exp(x) - 1 -
    x of KL(pi || pi_ref) (http://joschu.net/blog/kl-approx.html).

    The gradient of an estimator is not that of the divergence, and tokens are not sampled from pi. The importance
    weight w = min(pi / pi_behaviour, cap) corrects both: it multiplies k1 and k3 with its gradient, k2 as sg(w). Below
    the cap each then has, in the mean, the gradient of the divergence, w * k1 * grad log pi; k1 adds w * grad log pi,
    whose mean is 0. k3: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
    """
    assert batch.reference is not None
    importance = log_ratio(batch.logprobs, batch.behaviour).exp().clamp(max=cap)
    if estimator == "k2":
        importance = importance.detach()
    return importance * ESTIMATORS[estimator](log_ratio(batch.reference, batch.logprobs))


def correction(batch: TokenBatch, config: CorrectionConfig, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the factor of each token, float32 [N] without a gradient, and count masked and rejected tokens."""
    with torch.no_grad():
        ratio = log_ratio(batch.proximal.detach(), batch.behaviour)
        factor, sums = torch.ones_like(ratio), {}
        real = batch.weights > 0
        if config.weight == "token":
            factor = ratio.exp().clamp(max=cap)
        elif config.weight == "sequence":
            # Each term is clamped to the limit, but their sum may exceed it.
            whole = batch.sum_by_sequence(ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            factor = whole.exp().clamp(max=cap)
        if config.mask is not None:
            low, high = config.mask
            outside = (ratio.exp() < low) | (ratio.exp() > high)
            factor = torch.where(outside, 0.0, factor)
            sums["masked_fraction"] = (outside & real).sum()
        if config.reject is not None:
            refused = rejected(batch, ratio, config.reject)
            factor = torch.where(refused, 0.0, factor)
            sums["rejected_fraction"] = (refused & real).sum()
        return factor, sums


def rejected(batch: TokenBatch, ratio: Tensor, config: RejectConfig) -> Tensor:
    """Whether each token's sequence exceeds the limit of ``config``: bool [N]. ``ratio`` is log rho, float32 [N]."""
    values = ESTIMATORS[config.estimator](ratio)
    if config.over == "max":
        # k1 is negative for a token that became likelier; it counts as just as far from the sampler.
        measure = batch.max_by_sequence(values.abs())
    else:
        whole = batch.sum_by_sequence(values) if config.over == "sum" else batch.mean_by_sequence(values)
        measure = whole.abs()
    return measure > config.limit


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
        """Means of the sums, as metrics; empty without tokens.

        ``policy/behaviour_kl``: KL(behaviour || theta) by the k3 estimator mean(r - 1 - log r)
        (http://joschu.net/blog/kl-approx.html). ``policy/ess``: (sum r)^2 / (n sum r^2), the effective share of the
        sample, 1 on policy (Kong 1992). ``policy/engine_kl``: the same KL over fresh tokens, which shows how far engine
        and trainer differ. With ``policy/engine_kl_tokens``, their number, it is absent if there are no fresh tokens.
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
    r = log_ratio(batch.logprobs.detach(), batch.behaviour).double()
    ratio = r.exp()
    kl = ratio - 1.0 - r
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

"""Off-policy corrections: a factor for each token, constant in the gradient, that multiplies its loss.

rho = pi_prox / pi_behaviour: how much likelier a token was under the weights that the step began with than under those
that sampled it. A factor is the product of

    weight    min(rho, cap) of the token; or of its sequence, min(product of rho, cap); or 1
    mask      0 for a token whose rho is outside of [low, high], else 1
    reject    0 for all tokens of a sequence whose mean, sum or largest k is above a limit in size, else 1

Tokens of factor 0 stay in the step's denominator: a mask removes a gradient and does not raise the others'.

Sources: truncated importance sampling, IMPALA (arXiv 1802.01561), for engines that differ from the trainer
https://fengyao.notion.site/off-policy-rl; mask, IcePop (arXiv 2510.18855); estimators k1, k2, k3
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionConfig, RejectConfig
from asyncrl.learner.algorithm.token_batch import LOG_RATIO_LIMIT, TokenBatch, log_ratio

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r.square() / 2,
    "k3": lambda r: r.exp() - 1 - r,
}
"""Estimators on the log-ratio r = log(p / q) of a token sampled from q, nats; their mean is KL(q || p) (k2 nearly)."""


def correction(batch: TokenBatch, config: CorrectionConfig, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The factor of each token, float32 [N] without a gradient, and named sums over tokens."""
    with torch.no_grad():
        ratio = log_ratio(batch.proximal.detach(), batch.behaviour)
        factor, sums = torch.ones_like(ratio), {}
        real = batch.weights > 0
        if config.weight == "token":
            factor = ratio.exp().clamp(max=cap)
        elif config.weight == "sequence":
            # The sum leaves the limit that each of its terms keeps.
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
    """Whether each token is of a sequence that is out of bounds, bool [N]; ``ratio`` is log rho, [N]."""
    values = ESTIMATORS[config.estimator](ratio)
    if config.over == "max":
        # k1 is negative for a token that has become likelier, which is as far from the sampler.
        measure = batch.max_by_sequence(values.abs())
    else:
        whole = batch.sum_by_sequence(values) if config.over == "sum" else batch.mean_by_sequence(values)
        measure = whole.abs()
    return measure > config.limit

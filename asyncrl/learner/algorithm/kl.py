"""The divergence from a frozen reference, as a part of the loss (that in the reward is in kl_reward.py).

With x = log(pi_ref / pi), the estimators of KL(pi || pi_ref) on a token sampled from pi are k1 = -x, k2 = x^2 / 2 and
k3 = exp(x) - 1 - x (http://joschu.net/blog/kl-approx.html).

The gradient of an estimator is not that of the divergence, and tokens are not sampled from pi. Both are put
right by the importance weight w = min(pi / pi_behaviour, cap): k1 and k3 are multiplied by w with its gradient, k2 by
sg(w). Where w is below the cap, each then has the gradient of the divergence in the mean, w * k1 * grad log pi (for k1
with w * grad log pi besides, whose mean is 0). k3: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.learner.algorithm.corrections import ESTIMATORS
from asyncrl.learner.algorithm.token_batch import TokenBatch, log_ratio


def kl_losses(batch: TokenBatch, estimator: str, cap: float) -> Tensor:
    """Losses of the tokens, float32 [N] with a gradient, nats."""
    assert batch.reference is not None
    importance = log_ratio(batch.logprobs, batch.behaviour).exp().clamp(max=cap)
    if estimator == "k2":
        importance = importance.detach()
    return importance * kl_values(batch.logprobs, batch.reference, estimator)


def kl_values(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Value of the estimator at each token, [N], nats."""
    return ESTIMATORS[estimator](log_ratio(reference, logprobs))

"""The objective that is minimised: the loss of a token with its correction, the divergence from the reference, the
entropy bonus.

    objective = factor * loss + kl.coefficient * KL - entropy_bonus * H

for each token (with KL only under kl.place = "loss"); weighted, summed and divided by the denominator of the step, so
that the objectives of micro-batches add up to the step's. The factor (corrections.py) is 1 for a loss that corrects
itself. It keeps: ``named`` gives sums, which add up over micro-batches and ranks as well.

Fails with ConfigError where a loss cannot be found, does not take its options, or would be corrected twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from asyncrl.config.training import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithm.loss.corrections import ESTIMATORS, correction
from asyncrl.learner.algorithm.losses import TokenLosses, find_loss
from asyncrl.learner.algorithm.token_batch import TokenBatch, log_ratio
from asyncrl.outcome import LONGEST_NAME, MOST_NAMES
from asyncrl.workers.user_code import describe, find_place


class Objective:
    """The objective of a run."""

    def __init__(self, config: LearnerConfig) -> None:
        self._name = config.loss
        self._loss, self.traits = find_loss(config)
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
        self._names: frozenset[str] | None = None
        """Names of the sums of the loss, once it was called."""

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
        values, sums = self._token_losses(batch)
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

    def _token_losses(self, batch: TokenBatch) -> TokenLosses:
        try:
            values, sums = self._loss(batch=batch)
        except Exception as error:
            raise ConfigError([f"learner.loss: {self._name} failed: {describe(error)}"]) from error
        if values.shape != batch.logprobs.shape:
            told = f"{tuple(values.shape)} for {len(batch.logprobs)} tokens"
            raise ConfigError([f"learner.loss: {self._name} returned losses of shape {told}; it must be one for each"])
        if len(sums) > MOST_NAMES or any(len(str(name)) > LONGEST_NAME for name in sums):
            place = find_place(self._name)
            told = f"{len(sums)} sums, the longest name has {max(len(str(name)) for name in sums)} characters"
            allowed = f"{MOST_NAMES} names of {LONGEST_NAME} characters are allowed: each becomes a metric"
            raise ConfigError(
                [f"learner.loss: {self._name}{f' ({place})' if place else ''} returned {told}; {allowed}"]
            )
        for name, value in sums.items():
            if not isinstance(value, Tensor) or value.dim():
                told = f"returned as {name!r} what is no sum; it must be a tensor of one number"
                raise ConfigError([f"learner.loss: {self._name} {told}"])
        names = frozenset(sums)
        self._names = names if self._names is None else self._names
        if names != self._names:
            told = f"{sorted(self._names)} with one batch and {sorted(names)} with another; names must be the same"
            raise ConfigError([f"learner.loss: {self._name} returned the sums {told}"])
        return values, {name: value.detach() for name, value in sums.items()}


def kl_losses(batch: TokenBatch, estimator: str, cap: float) -> Tensor:
    """Divergence from the frozen reference in the loss, float32 [N] with a gradient, nats; see kl_reward.py too.

    With x = log(pi_ref / pi), the estimators of KL(pi || pi_ref) on a token sampled from pi are k1 = -x, k2 = x^2 / 2
    and k3 = exp(x) - 1 - x (http://joschu.net/blog/kl-approx.html).

    The gradient of an estimator is not that of the divergence, and tokens are not sampled from pi. Both are put
    right by the importance weight w = min(pi / pi_behaviour, cap): k1 and k3 are multiplied by w with its gradient, k2
    by sg(w). Where w is below the cap, each then has the gradient of the divergence in the mean, w * k1 * grad log pi
    (for k1 with w * grad log pi besides, whose mean is 0). k3: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
    """
    assert batch.reference is not None
    importance = log_ratio(batch.logprobs, batch.behaviour).exp().clamp(max=cap)
    if estimator == "k2":
        importance = importance.detach()
    return importance * ESTIMATORS[estimator](log_ratio(batch.reference, batch.logprobs))

"""The loss of a step: built-in losses, the objective that corrects, weights and sums them, and token statistics.

A TokenBatch has one entry for each token that has a loss, and none for context. Tokens of a sequence are side by side.
Invariant: only ``logprobs`` and ``entropies`` have a gradient, so a value made of other fields is a constant. A loss
keeps NaN, so that the update is refused.

A loss is a function of a TokenBatch and its options. It returns its token losses, float32 [N] with a gradient, and
named sums over tokens, scalars without a gradient. The sums appear as ``loss/NAME``, divided by the number of tokens. A
filler is a token of weight 0 that only keeps a rank busy (packing.py). A user's own loss is such a function too, named
by MODULE:FUNCTION. The decorator ``traits`` declares what a loss needs.

    objective = factor * loss + kl.coefficient * KL - entropy_bonus * H

for each token (KL only with kl.place = "loss"). The objective is weighted, summed and divided by the denominator of the
update. So the objectives of micro-batches add up to that of the update, and so do the named sums.

The factor (``correction``) is constant in the gradient. rho = pi_prox / pi_b says how much likelier a token is under
the step's first weights than under the weights that sampled it. The factor is the product of

    weight    min(rho, cap) of the token; or of its sequence, min(product of rho, cap); or 1, as for a loss that
              corrects itself
    mask      0 for a token whose rho is outside [low, high], else 1
    reject    0 for all tokens of a sequence whose mean, sum or largest k exceeds a limit in size, else 1

Tokens of factor 0 stay in the denominator: a mask removes a gradient and does not raise those of other tokens.

pi is the probability of the sampled token under the weights that are trained. pi_prox is that under the weights before
the first update from the batch, and pi_b the engine's. A is the advantage; sg stops the gradient.

Sources: PPO arXiv 1707.06347; decoupled PPO arXiv 2505.24298; asymmetric clip (DAPO) arXiv 2503.14476; GSPO arXiv
2507.18071; CISPO arXiv 2506.13585; DPPO arXiv 2602.04879; truncated weights (IMPALA) arXiv 1802.01561, for engines that
differ from the trainer https://fengyao.notion.site/off-policy-rl; mask, IcePop arXiv 2510.18855; on-policy distillation
(GKD, reverse KL on the student's samples) arXiv 2306.13649; estimators k1, k2, k3
http://joschu.net/blog/kl-approx.html.

The statistics measure the distance of the policy from the one that sampled the tokens. Each micro-batch gives the sums
of its tokens. The sums of all micro-batches and ranks give the metrics ``policy/*``.

The objective fails with ConfigError if the loss would be corrected twice, lacks the teacher that it needs, or has one
without need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionConfig, RejectConfig
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.built_in import BuiltIn

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats: exp(20) still squares within float32."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N tokens of S sequences.

    Log-probs are of the sampled token, in nats, at the temperature of sampling, and within its set if there is one.
    """

    logprobs: Tensor
    """Log-prob under the weights that are trained: float32 [N], with a gradient."""
    entropies: Tensor
    """Entropy, nats: float32 [N]; with a gradient under the loss's ``entropy_gradient`` or an entropy bonus."""
    behaviour: Tensor
    """Log-prob as the engine reported it, under the version that sampled the token: float32 [N]."""
    proximal: Tensor
    """Log-prob under the weights before the first update from the batch, whose ``logprobs`` it equals: float32 [N]."""
    advantages: Tensor
    """Advantage: float32 [N]."""
    weights: Tensor
    """Weight in the sum that is divided by the update's denominator (batch.py): float32 [N]; 0 in a filler."""
    segments: Tensor
    """Index of the sequence that each token belongs to: int64 [N], ascending from 0."""
    sequences: int
    """Number of sequences, S."""
    staleness: Tensor
    """Staleness, versions: int32 [N]; -1 where the engine's log-prob is of no single version."""
    reference: Tensor | None = None
    """Log-prob under the frozen reference: float32 [N]; None unless the objective needs it."""
    teacher: Tensor | None = None
    """Log-prob under the teacher: float32 [N]; None unless the loss has the trait ``teacher``."""

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Give each token the sum of ``values`` over its sequence: [N] -> [N]."""
        return values.new_zeros(self.sequences).index_add(0, self.segments, values)[self.segments]

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """Give each token the mean of ``values`` over its sequence: [N] -> [N]."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(values.detach().new_ones(len(values)))

    def max_by_sequence(self, values: Tensor) -> Tensor:
        """Give each token the largest of ``values`` in its sequence, without a gradient: [N] -> [N]."""
        largest = values.detach().new_full((self.sequences,), float("-inf"))
        return largest.scatter_reduce(0, self.segments, values.detach(), "amax")[self.segments]


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log of new / old for two log-probs, clamped to +-20. Keeps NaN."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Token losses [N], and named sums."""
BUILT_IN = BuiltIn()
"""Built-in losses by name."""


class Loss(Protocol):
    """A loss with its options filled in."""

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """The token losses and named sums of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The needs of a loss, and how it may be used."""

    corrects: bool = False
    """Whether the loss itself uses the ratio to the engine's log-probs; the objective then adds no such weight."""
    entropy_gradient: bool = False
    """Whether the loss needs entropies with a gradient."""
    reference: bool = False
    """Whether the loss needs the reference's log-probs."""
    teacher: bool = False
    """Whether the loss needs the teacher's log-probs."""
    multiple_of_advantage: bool = False
    """Whether a token of advantage 0 has no gradient. A sequence of only such tokens may then be left out."""


_Function = TypeVar("_Function", bound=Callable[..., TokenLosses])


def traits(**needs: bool) -> Callable[[_Function], _Function]:
    """Decorator: declare the needs of a loss, as fields of Traits. A loss without the decorator has the defaults."""

    def mark(function: _Function) -> _Function:
        function.traits = Traits(**needs)  # type: ignore[attr-defined]
        return function

    return mark


@BUILT_IN.add(
    "PPO-clip of pi / pi_prox, times the factor",
    "the default; stale data, several updates a batch",
)
@traits(multiple_of_advantage=True)
def decoupled(batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLosses:
    """Decoupled PPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_prox.

    With one update from a batch r is 1 and its gradient that of log pi: no clip acts. Multiplied by the correction
    min(pi_prox / pi_b, C), the loss is AReaL's objective (eq. 5). ``clip_high`` above ``clip_low`` is DAPO's
    asymmetric clip.
    """
    return _clipped(batch, log_ratio(batch.logprobs, batch.proximal).exp(), clip_low, clip_high)


@BUILT_IN.add(
    "PPO-clip of pi / pi_b",
    "little staleness; the clip bounds staleness and update together",
)
@traits(corrects=True, multiple_of_advantage=True)
def bypass(batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLosses:
    """PPO against the engine: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_b."""
    return _clipped(batch, log_ratio(batch.logprobs, batch.behaviour).exp(), clip_low, clip_high)


@BUILT_IN.add(
    "PPO-clip of the sequence's geometric mean of pi / pi_b",
    'mixtures of experts, long responses; with `aggregation = "sequence"`',
)
@traits(corrects=True, multiple_of_advantage=True)
def gspo(batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLosses:
    """Group sequence policy optimization: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    s is the ratio of the sequence, the exp of the mean of log(pi / pi_b) over its tokens. This is the token form of the
    paper (eq. 13, 14): the value is s, the gradient at each token that of s * log pi, so that turns may have their own
    advantages. Belongs with ``learner.aggregation = "sequence"``.
    """
    sequence_log_ratio = batch.mean_by_sequence(log_ratio(batch.logprobs.detach(), batch.behaviour))
    ratio = (sequence_log_ratio + batch.logprobs - batch.logprobs.detach()).exp()
    return _clipped(batch, ratio, clip_low, clip_high)


@BUILT_IN.add(
    "-sg(clip(pi / pi_b)) A log pi",
    "keeping the gradient of every token",
)
@traits(corrects=True, multiple_of_advantage=True)
def cispo(batch: TokenBatch, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLosses:
    """Clipped importance-sampling policy optimization: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    r = pi / pi_b.
    Every token keeps its gradient; only its weight is clipped. A ``clip_low`` of 1 leaves the lower side open.
    """
    ratio = log_ratio(batch.logprobs.detach(), batch.behaviour).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -clipped * batch.advantages * batch.logprobs, {"clipped_fraction": _count(batch, clipped != ratio)}


@BUILT_IN.add(
    "-A pi / pi_b, but for tokens that have moved by more than `threshold` in probability",
    "rare tokens, which a ratio's clip holds back",
)
@traits(corrects=True, multiple_of_advantage=True)
def dppo(batch: TokenBatch, *, threshold: float = 0.2) -> TokenLosses:
    """Divergence PPO with the binary total variation: -m A r, r = pi / pi_b.

    m is 0 if |pi - pi_b| > ``threshold`` and the gradient would lead further away (A > 0 and pi > pi_b, or A < 0 and
    pi < pi_b), else 1. This bounds probabilities; PPO bounds their ratio.
    """
    ratio = log_ratio(batch.logprobs, batch.behaviour).exp()
    away = (batch.logprobs.detach().exp() - batch.behaviour.exp()) * batch.advantages.sign()
    outside = away > threshold
    losses = -torch.where(outside, 0.0, batch.advantages * ratio)
    return losses, {"clipped_fraction": _count(batch, outside)}


@BUILT_IN.add(
    "-sg(min(pi / pi_b, `clamp`)) A log pi",
    "the plainest; many engines, short steps",
)
@traits(corrects=True, multiple_of_advantage=True)
def reinforce(batch: TokenBatch, *, clamp: float = 1.02) -> TokenLosses:
    """REINFORCE with a clamped weight: -sg(min(pi / pi_b, clamp)) A log pi."""
    ratio = log_ratio(batch.logprobs.detach(), batch.behaviour).exp()
    losses = -ratio.clamp(max=clamp) * batch.advantages * batch.logprobs
    return losses, {"clipped_fraction": _count(batch, ratio > clamp)}


@BUILT_IN.add(
    "reverse KL to `learner.teacher` at each sampled token",
    "learning from a larger model on the policy's own samples",
)
@traits(teacher=True)
def distill(batch: TokenBatch, *, reward: float = 0.0) -> TokenLosses:
    """On-policy distillation: reverse KL to the teacher at each sampled token, -sg(D) pi / sg(pi).

    D = log pi_teacher - log pi + reward * A takes the place of the advantage. With ``reward`` 0 rewards have no
    influence, and the mean of D over the student's samples is minus the KL.
    """
    assert batch.teacher is not None
    gap = batch.teacher - batch.logprobs.detach()
    # The value is 1, and its gradient is that of log pi.
    ratio = (batch.logprobs - batch.logprobs.detach()).exp()
    return -(gap + reward * batch.advantages) * ratio, {"teacher_kl": -(gap * (batch.weights > 0)).sum()}


def supervised(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood, -log pi, nats, of tokens that the policy did not sample: those of ``[sft]``."""
    return -logprobs


def _clipped(batch: TokenBatch, ratio: Tensor, low: float, high: float) -> TokenLosses:
    """Token losses -min(r A, clip(r, 1 - low, 1 + high) A) with r = ``ratio``, and the number of clipped tokens."""
    plain = ratio * batch.advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * batch.advantages
    # Where both are equal, ``plain`` has the whole gradient: torch's minimum would give each of them one half.
    clipped = bounded < plain
    return -torch.where(clipped, bounded, plain), {"clipped_fraction": _count(batch, clipped)}


def _count(batch: TokenBatch, tokens: Tensor) -> Tensor:
    """Count these tokens, bool [N], without fillers. The metric ``loss/NAME`` is this sum as a share of all tokens."""
    return (tokens & (batch.weights > 0)).sum()


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
        """The configured correction, in which "auto" is replaced by the weight that the loss needs."""
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
        # Only the token of a filler has weight 0.
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
    """Sums over loss tokens; r = pi / pi_b, not truncated. In the order of ``token_sums``.

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
        """Return the metrics of these sums; empty without tokens.

        ``policy/behaviour_kl``: KL(pi_b || pi) by the k3 estimator mean(r - 1 - log r)
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

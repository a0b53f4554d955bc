"""The drift of an engine from the learner under the same weights: measured by a probe, and judged.

Drift is the difference (nats) between the engine's and the learner's log-probs of the same tokens. A probe
(messages/weights.py) brings sequences with the learner's log-probs. Two sets of tokens are compared: some hundreds
given tokens, which the engine scores, and a few that it samples under the run's own parameters. Scored tokens show the
weights. Sampled ones also show what an engine does to its logits before it samples: a temperature, a cut of the
distribution, a penalty.

The first set gives the root mean square of the differences: one token that is far off shows as much as many tokens that
are a little off. In the second set one rounding error would dominate a square. So there the mean absolute difference
counts, scaled by NORMAL. The drift is the larger of both, so neither set hides the other.

A probe's requests are few and short, are sent at once, and run before requests that wait. Fails with EngineDied as the
engine does. A token that is not sampled, because the engine is paused, is left out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from asyncrl.config.monitor import DriftConfig
from asyncrl.core.truncation import Truncation
from asyncrl.messages.weights import Probe
from asyncrl.rollouter.engines.base import FIRST, Engine, GenerationRequest


async def probe_engine(
    engine: Engine, probe: Probe, *, version: int, temperature: float, truncation: Truncation | None = None
) -> Drift:
    """Send a probe to an engine that has loaded ``version`` and measure its drift.

    ``temperature`` and ``truncation`` are the run's. Raises EngineDied.
    """
    sequences = [part.tolist() for part in np.split(probe.tokens, np.cumsum(probe.lengths)[:-1])]
    requests = [
        GenerationRequest(
            id=f"probe/{version}/{index}",
            prompt_ids=sequences[number][:place],
            max_tokens=1,
            temperature=temperature,
            truncation=truncation,
            seed=None,
            cache_salt=f"v{version}",
            priority=FIRST,
        )
        for index, (number, place) in enumerate(probe.places.tolist())
    ]
    work = [engine.score(tokens) for tokens in sequences], [_sample(engine, request) for request in requests]
    scores, samples = await asyncio.gather(*(asyncio.gather(*each, return_exceptions=True) for each in work))
    # Errors are raised only now, when no request runs any more: a dead engine fails all requests.
    for outcome in (*scores, *samples):
        if isinstance(outcome, BaseException):
            raise outcome
    return measure_drift(probe, scores, samples)  # type: ignore[arg-type]


async def _sample(engine: Engine, request: GenerationRequest) -> Sample | None:
    """Sample one token; None if the engine aborts the request before."""
    sampled: list[Sample] = []
    async with aclosing(engine.generate(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if delta.tokens:
                members = None if delta.sets is None else delta.sets.first(1).ids
                # Without the set that it was sampled from, a token of a truncated distribution cannot be trained.
                lost = request.truncation is not None and members is None
                sampled.append(Sample(delta.tokens[0], math.nan if lost else delta.logprobs[0], members))
    return sampled[0] if sampled else None


MIN_SAMPLES = 8
"""Fewest sampled tokens whose mean is taken; a mean of fewer says little."""
NORMAL = math.sqrt(math.pi / 2)
"""Root mean square divided by mean absolute value, for a normal distribution around 0."""

FAR = 1e6
"""Drift (nats) of an engine whose log-probs are not finite; above every drift.stop."""


class Sample(NamedTuple):
    """A sampled token."""

    token: int
    logprob: float
    """Its log-prob, nats; NaN if the engine did not return its set."""
    members: np.ndarray | None = None
    """int32: the set that it was sampled from; None if the distribution was not truncated."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences of log-probs (nats); FAR where an engine's log-prob is no finite number."""

    scored: float
    """Root mean square of the differences over given tokens, at temperature 1; 0 without such tokens."""
    sampled: float | None
    """NORMAL times the mean absolute difference over sampled tokens, at the run's temperature; None with too few."""
    worst: float
    """The largest absolute difference."""
    kl: float
    """Estimate of the KL divergence: mean over given tokens of r - 1 - log r, r the engine's probability over the
    learner's (k3 of http://joschu.net/blog/kl-approx.html)."""
    tokens: int
    """Number of given and sampled tokens."""

    @property
    def nats(self) -> float:
        """The drift (nats)."""
        return max(self.scored, self.sampled or 0.0)

    def __str__(self) -> str:
        summary = f"{self.nats:.3g} nats apart over {self.tokens} tokens, at worst {self.worst:.3g}"
        sampled = "too few for a verdict" if self.sampled is None else f"{self.sampled:.3g}"
        return f"their log-probs are {summary} ({self.scored:.3g} over given tokens, {sampled} over sampled ones)"


def measure_drift(probe: Probe, scores: Sequence[Sequence[float]], samples: Sequence[Sample | None]) -> Drift:
    """Compare an engine's answers to the probe with the learner's log-probs.

    ``scores`` has the log-probs of each sequence's tokens, except the first; ``samples`` has the token sampled at each
    of the probe's places, or None. Raises ValueError if their numbers do not match the probe.
    """
    engine_logprobs = [np.array(each, np.float64) for each in scores]
    if [len(each) + 1 for each in engine_logprobs] != probe.lengths.tolist() or len(samples) != len(probe.places):
        raise ValueError("the scores are not those of the probe's sequences")
    scored = np.concatenate(engine_logprobs) - probe.logprobs
    differences: list[float] = []
    for sample, likeliest, learner_logprobs in zip(samples, probe.likeliest, probe.likeliest_logprobs, strict=True):
        if sample is not None:
            if sample.members is not None:
                inside = np.isin(likeliest, sample.members)
                # The learner has to know the probability of the whole set.
                if inside.sum() < len(sample.members):
                    continue
                learner_logprobs = learner_logprobs - np.logaddexp.reduce(learner_logprobs[inside].astype(np.float64))
            # Without a match the learner sent no log-prob of the token, and the token is left out.
            found = np.flatnonzero(likeliest == sample.token)
            differences += [sample.logprob - float(learner_logprobs[at]) for at in found]
    sampled = np.array(differences, np.float64)
    # A few finite differences say little; one that is not finite says enough.
    enough = len(sampled) >= MIN_SAMPLES or not np.isfinite(sampled).all()
    everything = np.abs(np.concatenate([scored, sampled]))
    with np.errstate(over="ignore", invalid="ignore"):
        kl = np.expm1(scored) - scored
    return Drift(
        scored=_root_mean_square(scored),
        sampled=_finite(NORMAL * np.abs(sampled).mean()) if enough else None,
        worst=_finite(everything.max(initial=0.0)),
        kl=_finite(kl.mean()) if len(kl) else 0.0,
        tokens=len(everything),
    )


def _root_mean_square(differences: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return _finite(np.sqrt(np.square(differences).mean())) if len(differences) else 0.0


def _finite(value: float | np.floating) -> float:
    """Return ``value``; FAR in place of NaN and infinity."""
    return float(value) if np.isfinite(value) else FAR


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """The drifts (nats) at which the user is warned and at which the run stops."""

    warn: float
    stop: float


ROUNDING = {True: DriftLimits(warn=0.003, stop=0.01), False: DriftLimits(warn=0.12, stop=0.15)}
"""Default limits; the key is whether learner and engine both compute in float32, on CPU. Measured with vLLM on CPU,
without an error, with noise of 1 % on each weight of the engine, and with temperature 0.9 instead of 1.0:

                                                clean (largest)    noise (least)    temperature (least)
    float32, two layers, made up                1e-6               0.059            0.11
    bfloat16, two layers, made up               0.020              0.063            0.11
    bfloat16, SmolLM2-135M, chat prompts        0.104              0.206            0.23

In bfloat16 the limits are those of a real model, because the effects of rounding and noise grow with depth."""


QUANTIZED = DriftLimits(warn=0.45, stop=0.6)
"""Default limits of an engine with quantized weights. In fp8, with vLLM on CPU, SmolLM2-135M drifted by 0.40. A made-up
model drifted by 0.15, and by 0.76 with noise of 10 % on each weight. A temperature of 0.9 stays below."""


def find_limits(config: DriftConfig, *, float32: bool, quantized: bool = False) -> DriftLimits:
    """Return the configured limits; for "auto" those of ROUNDING, whose key is ``float32``, or QUANTIZED.

    An automatic ``stop`` is raised to a configured ``warn`` above it; else ``warn`` is lowered to ``stop``.
    """
    auto = QUANTIZED if quantized else ROUNDING[float32]
    stop = auto.stop if config.stop == "auto" else config.stop
    warn = auto.warn if config.warn == "auto" else config.warn
    if config.stop == "auto":
        stop = max(stop, warn)
    return DriftLimits(warn=min(warn, stop), stop=stop)


Verdict: TypeAlias = Literal["agrees", "warn", "stop"]


def judge(drift: Drift, limits: DriftLimits) -> Verdict:
    """Compare a drift with its limits."""
    if drift.nats >= limits.stop:
        return "stop"
    return "warn" if drift.nats >= limits.warn else "agrees"


class DriftRecord:
    """The drifts of one replica since its start."""

    def __init__(self) -> None:
        self.warnings = 0
        """Number of drifts at or above drift.warn."""
        self.metrics: dict[str, float] = {}
        """The metrics of the drift; empty before the first one. Readable from any thread."""

    def add(self, drift: Drift, verdict: Verdict) -> None:
        """Add one more drift, after an update."""
        self.warnings += verdict != "agrees"
        self.metrics = {
            "rollout/drift": drift.nats,
            "rollout/drift_largest": max(drift.nats, self.metrics.get("rollout/drift_largest", 0.0)),
            "rollout/drift_warnings": self.warnings,
        }


def explain(drift: Drift) -> str:
    """Return a text with the likely causes of a drift, where to look for them, and the remedy."""
    if drift.sampled is not None and drift.sampled > 2 * drift.scored:
        cause = (
            "the weights agree and what is sampled does not, so the engine changes its logits: another temperature "
            "than rollout.temperature, a cut of the distribution whose token sets it does not return, a penalty; look "
            "at rollout.vllm.extra and at plugins"
        )
    else:
        cause = (
            "the engine computes with other weights or in another way: weights of another version or loaded wrongly "
            '(weights.verify = "full" loads again), another dtype than learner.dtype, quantization or another '
            "attention in rollout.vllm.extra, a model that transformers and the engine compute differently"
        )
    return f"{cause}. Where the difference is meant, raise drift.warn and drift.stop above it"

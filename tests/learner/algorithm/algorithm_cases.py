"""Random ragged batches of tokens, and each loss written down a second time: plain Python, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncrl.learner.algorithm.losses import TokenBatch

Reference = Callable[..., tuple[list[float], list[float]]]
"""Token losses of one sequence, and the gradient of their sum by the token's own log-prob."""


def make_batch(seed: int, *, drift: float = 0.5, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Two to six sequences of one to nine tokens; the last has weight 0, as a filler has."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 10, random.integers(2, 7))
    total = int(lengths.sum())
    proximal = -3 * random.random(total)

    def near(scale: float) -> torch.Tensor:
        return torch.tensor(np.minimum(proximal + scale * random.standard_normal(total), 0.0), dtype=dtype)

    segments = np.repeat(np.arange(len(lengths)), lengths)
    weights = random.random(total) + 0.1
    weights[segments == len(lengths) - 1] = 0.0
    return TokenBatch(
        logprobs=near(drift / 2).requires_grad_(),
        entropies=torch.tensor(random.random(total), dtype=dtype).requires_grad_(),
        behaviour=near(drift),
        proximal=torch.tensor(proximal, dtype=dtype),
        advantages=torch.tensor(random.standard_normal(len(lengths))[segments], dtype=dtype),
        weights=torch.tensor(weights, dtype=dtype),
        segments=torch.tensor(segments),
        sequences=len(lengths),
        staleness=torch.tensor(random.integers(-1, 3, total), dtype=torch.int32),
        reference=near(drift),
        teacher=near(drift),
    )


def by_sequence(batch: TokenBatch) -> list[list[dict[str, float]]]:
    """The batch as lists of tokens."""
    names = ("logprobs", "behaviour", "proximal", "advantages", "weights", "reference", "teacher")
    columns = {name: getattr(batch, name).detach().tolist() for name in names}
    sequences: list[list[dict[str, float]]] = [[] for _ in range(batch.sequences)]
    for i, segment in enumerate(batch.segments.tolist()):
        sequences[segment].append({name: values[i] for name, values in columns.items()})
    return sequences


def ppo(tokens: list[dict[str, float]], old: str, low: float, high: float) -> tuple[list[float], list[float]]:
    values, gradient = [], []
    for token in tokens:
        ratio, advantage = math.exp(token["logprobs"] - token[old]), token["advantages"]
        bounded = min(max(ratio, 1 - low), 1 + high)
        values.append(-min(ratio * advantage, bounded * advantage))
        gradient.append(0.0 if bounded * advantage < ratio * advantage else -advantage * ratio)
    return values, gradient


def decoupled(tokens: Any, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[list[float], list[float]]:
    return ppo(tokens, "proximal", clip_low, clip_high)


def bypass(tokens: Any, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[list[float], list[float]]:
    return ppo(tokens, "behaviour", clip_low, clip_high)


def gspo(tokens: Any, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[list[float], list[float]]:
    ratio = math.exp(sum(t["logprobs"] - t["behaviour"] for t in tokens) / len(tokens))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    values, gradient = [], []
    for token in tokens:
        acts = bounded * token["advantages"] < ratio * token["advantages"]
        values.append(-(bounded if acts else ratio) * token["advantages"])
        gradient.append(0.0 if acts else -ratio * token["advantages"])
    return values, gradient


def cispo(tokens: Any, clip_low: float = 1.0, clip_high: float = 4.0) -> tuple[list[float], list[float]]:
    weights = [min(max(math.exp(t["logprobs"] - t["behaviour"]), 1 - clip_low), 1 + clip_high) for t in tokens]
    gradient = [-w * t["advantages"] for w, t in zip(weights, tokens, strict=True)]
    return [g * t["logprobs"] for g, t in zip(gradient, tokens, strict=True)], gradient


def dppo(tokens: Any, threshold: float = 0.2) -> tuple[list[float], list[float]]:
    values = []
    for token in tokens:
        moved = math.exp(token["logprobs"]) - math.exp(token["behaviour"])
        outside = moved > threshold if token["advantages"] > 0 else moved < -threshold
        ratio = math.exp(token["logprobs"] - token["behaviour"])
        values.append(0.0 if outside else -token["advantages"] * ratio)
    return values, values


def reinforce(tokens: Any, clamp: float = 1.02) -> tuple[list[float], list[float]]:
    gradient = [-min(math.exp(t["logprobs"] - t["behaviour"]), clamp) * t["advantages"] for t in tokens]
    return [g * t["logprobs"] for g, t in zip(gradient, tokens, strict=True)], gradient


def distill(tokens: Any, reward: float = 0.0) -> tuple[list[float], list[float]]:
    values = [-(t["teacher"] - t["logprobs"] + reward * t["advantages"]) for t in tokens]
    return values, values


REFERENCES: dict[str, Reference] = {f.__name__: f for f in (decoupled, bypass, gspo, cispo, dppo, reinforce, distill)}

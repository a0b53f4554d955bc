"""The check at start: is what the learner computes from a packed row what the model says of each sequence
alone?

Some architectures leak from one packed sequence into the next, and some do more to their logits than to apply
the head; either trains on wrong ratios without a word. So a random batch is scored both ways, in float32 on
the CPU, before the model is sharded, and the learner takes the fastest way that agrees with the slowest:

    rows        several sequences a row (own attention, else transformers'), else one sequence a row
    logits      in chunks, else the model's own

Fails with ConfigError under ``packing = "required"`` when no way of packing agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from asyncrl.config.training import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.policy import Policy, Row, make_row

TOLERANCE = 1e-4
"""Largest difference of a log-prob, nats, that still counts as rounding (float32)."""
LENGTHS = (7, 1, 19, 12, 5)
"""Of the random sequences: short, so that what leaks in from a neighbour weighs much."""


class Scoring(msgspec.Struct, frozen=True):
    """The way in which the learner scores, the same on all ranks."""

    packed: bool
    """Several sequences a row."""
    packed_attention: bool
    """With attention.py's attention."""
    chunked: bool
    """Logits in chunks."""
    warnings: list[str] = []

    def apply(self, policy: Policy) -> None:
        """Make ``policy`` score this way."""
        policy.chunked = self.chunked
        policy.use_attention(self.packed_attention)


@dataclass(frozen=True)
class _Batch:
    packed: Row
    single: list[Row]


def choose_scoring(policy: Policy, config: LearnerConfig, *, seed: int) -> Scoring:
    """Try the ways of scoring on a random batch. ``policy`` holds the whole model. Raises ConfigError.

    Leaves ``policy`` set to the way that was chosen.
    """
    batch = _random_batch(policy, seed)
    warnings: list[str] = []
    Scoring(packed=False, packed_attention=False, chunked=False).apply(policy)
    truth = _score(policy, batch.single)

    policy.chunked = True
    worst = _difference(policy, batch.single, truth)
    policy.chunked = chunked = isinstance(worst, float) and worst <= TOLERANCE
    if not chunked:
        warnings.append(f"log-probs in chunks differ from the model's own logits ({worst}); whole logits are held")

    scoring = Scoring(packed=False, packed_attention=False, chunked=chunked)
    if config.packing != "off":
        found = {}
        for own in (True, False):
            policy.use_attention(own)
            found[own] = worst = _difference(policy, [batch.packed], truth)
            if isinstance(worst, float) and worst <= TOLERANCE:
                scoring = Scoring(packed=True, packed_attention=own, chunked=chunked)
                break
        else:
            what = f"log-probs of a packed row differ from those of single sequences ({found[False]})"
            if config.packing == "required":
                raise ConfigError([f'learner.packing: is "required", but with this model {what}'])
            warnings.append(f"{what}; each row holds one sequence")
        if not scoring.packed_attention and scoring.packed:
            warnings.append(f"own attention over packed rows cannot be used ({found[True]}); transformers' is slower")
    scoring.apply(policy)
    return msgspec.structs.replace(scoring, warnings=warnings)


def _random_batch(policy: Policy, seed: int) -> _Batch:
    random = np.random.default_rng(seed)
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    tokens = [random.integers(0, vocabulary, n + 1) for n in LENGTHS]
    cpu = torch.device("cpu")
    return _Batch(
        packed=make_row(
            np.concatenate([t[:-1] for t in tokens]),
            LENGTHS,
            np.arange(sum(LENGTHS)),
            np.concatenate([t[1:] for t in tokens]),
            cpu,
        ),
        single=[make_row(t[:-1], [n], np.arange(n), t[1:], cpu) for t, n in zip(tokens, LENGTHS, strict=True)],
    )


def _score(policy: Policy, rows: list[Row]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([policy.score(row, 1.0)[0] for row in rows])


def _difference(policy: Policy, rows: list[Row], truth: torch.Tensor) -> float | str:
    """Largest difference in nats, or why this way cannot be gone."""
    try:
        scores = _score(policy, rows)
    except (NotImplementedError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # Any of these is how a model says that it does not support a way of being called.
        return f"{type(error).__name__}: {error}"
    worst = float((scores - truth).abs().max())
    return worst if np.isfinite(worst) else "not finite"

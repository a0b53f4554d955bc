"""The probe: a few fixed sequences of random tokens that the learner scores at each publication.

An engine that serves the same weights gives them the same log-probs within rounding; one that does not has other
weights, or computes something else from them. The sequences depend on seed, vocabulary and context alone. All ranks
score them alike, so that their collectives stay in step, without a gradient, and leave the weights cut up as they
were.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import Config
from asyncrl.learner.policy import Policy, Row, make_row
from asyncrl.messages.weights import Probe

SEQUENCES, LENGTH = 4, 32


def probe_length(config: Config) -> int:
    """LENGTH, or what the engines' context has room for beside the token that they sample when they score."""
    return min(LENGTH, config.data.max_prompt_tokens + config.rollout.max_tokens - 1)


def draw_probe(seed: int, vocabulary: int, length: int) -> np.ndarray:
    """int32 [SEQUENCES, length]: token ids below ``vocabulary``."""
    return np.random.default_rng([seed, vocabulary]).integers(0, vocabulary, (SEQUENCES, length), dtype=np.int32)


def score_probe(policy: Policy, *, seed: int, length: int, packed: bool, device: torch.device) -> Probe:
    """All ranks together: what the present weights make of it, at temperature 1, in the rows that training uses."""
    tokens = draw_probe(seed, policy.model.get_input_embeddings().num_embeddings, length)
    with torch.no_grad():
        scores = [policy.score(row, 1.0)[0] for row in _rows(tokens, packed, device)]
    for module in policy.modules():
        # FSDP keeps what is outside of the layers whole for a backward pass, which will not come.
        if isinstance(module, FSDPModule):
            module.reshard()
    return Probe(tokens=tokens, logprobs=torch.cat(scores).cpu().numpy().reshape(SEQUENCES, length - 1))


def _rows(tokens: np.ndarray, packed: bool, device: torch.device) -> list[Row]:
    batches = [tokens] if packed else [sequence[None] for sequence in tokens]
    return [
        make_row(
            batch[:, :-1].reshape(-1),
            [batch.shape[1] - 1] * len(batch),
            np.arange(batch[:, 1:].size),
            batch[:, 1:].reshape(-1),
            device,
        )
        for batch in batches
    ]

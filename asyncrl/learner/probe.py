"""The probe: a few fixed sequences of random tokens that the learner scores at each publication.

An engine that serves the same weights gives them the same log-probs within rounding; one that does not has other
weights, or computes something else from them. The sequences depend on the seed and the vocabulary alone. All ranks
score them alike, so that their collectives stay in step, without a gradient, and leave the weights cut up as they
were.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from asyncrl.learner.policy import Policy, Row, make_row
from asyncrl.messages import Probe

SEQUENCES, LENGTH = 4, 32


def draw_probe(seed: int, vocabulary: int) -> np.ndarray:
    """int32 [SEQUENCES, LENGTH]: token ids below ``vocabulary``."""
    return np.random.default_rng([seed, vocabulary]).integers(0, vocabulary, (SEQUENCES, LENGTH), dtype=np.int32)


def score_probe(policy: Policy, *, seed: int, packed: bool, device: torch.device) -> Probe:
    """All ranks together: what the present weights make of it, at temperature 1, in the rows that training uses."""
    tokens = draw_probe(seed, policy.model.get_input_embeddings().num_embeddings)
    with torch.no_grad():
        scores = [policy.score(row, 1.0)[0] for row in _rows(tokens, packed, device)]
    for module in policy.modules():
        # FSDP keeps what is outside of the layers whole for a backward pass, which will not come.
        if isinstance(module, FSDPModule):
            module.reshard()
    return Probe(tokens=tokens, logprobs=torch.cat(scores).cpu().numpy().reshape(SEQUENCES, LENGTH - 1))


def _rows(tokens: np.ndarray, packed: bool, device: torch.device) -> list[Row]:
    batches = [tokens] if packed else [sequence[None] for sequence in tokens]
    return [
        make_row(
            batch[:, :-1].reshape(-1),
            [LENGTH - 1] * len(batch),
            np.arange(batch[:, 1:].size),
            batch[:, 1:].reshape(-1),
            device,
        )
        for batch in batches
    ]

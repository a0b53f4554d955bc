"""The probe: what the learner's weights make of a few sequences, scored at each publication.

An engine that serves the same weights gives their tokens the same log-probs within rounding, and samples at the run's
temperature each next token with the log-prob that is told for it here; one that does not has other weights, or computes
something else from them. All ranks score alike, so that their collectives stay in step, without a gradient, and leave
the weights cut up as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.learner.fsdp.policy import Policy, Row, make_row
from asyncrl.learner.probe_sequences import ProbeSequence
from asyncrl.messages.weights import Probe

PLACES = 4
"""Of each sequence, at which an engine samples a token."""
LIKELIEST = 128
"""Tokens that are told for each place: what is sampled there is mostly one of them."""


def score_probe(
    policy: Policy, sequences: Sequence[ProbeSequence], *, temperature: float, packed: bool, device: torch.device
) -> Probe:
    """All ranks together: what the present weights make of it, in the rows that training uses.

    Given tokens are scored at temperature 1, as engines score them; the likeliest ones at ``temperature``. Places are
    those of the largest entropy: where one token is certain, no temperature shows.
    """
    count = min(LIKELIEST, policy.model.get_output_embeddings().weight.shape[0])
    logprobs, places, likeliest, likeliest_logprobs = [], [], [], []
    for row in [sequences] if packed else [[sequence] for sequence in sequences]:
        with torch.no_grad():
            scored, entropies = policy.score(_scored(row, device), 1.0)
        chosen = [
            _places(sequence, own)
            for sequence, own in zip(
                row, torch.split(entropies, [len(sequence.tokens) - 1 for sequence in row]), strict=True
            )
        ]
        tokens, values = policy.likeliest(_asked(row, chosen, device), temperature, count)
        logprobs.append(scored)
        places += chosen
        likeliest.append(tokens)
        likeliest_logprobs.append(values)
    policy.reshard()
    return Probe(
        tokens=np.concatenate([sequence.tokens for sequence in sequences]).astype(np.int32),
        lengths=np.array([len(sequence.tokens) for sequence in sequences], np.int32),
        logprobs=torch.cat(logprobs).cpu().numpy(),
        places=np.array([(number, place) for number, own in enumerate(places) for place in own], np.int32),
        likeliest=torch.cat(likeliest).cpu().numpy().astype(np.int32),
        likeliest_logprobs=torch.cat(likeliest_logprobs).cpu().numpy(),
    )


def _scored(sequences: Sequence[ProbeSequence], device: torch.device) -> Row:
    """Each token but a sequence's first is a target."""
    starts = _starts(sequences)
    predict = [np.arange(len(s.tokens) - 1) + start for s, start in zip(sequences, starts, strict=True)]
    return _row(sequences, np.concatenate(predict), [token for s in sequences for token in s.tokens[1:]], device)


def _places(sequence: ProbeSequence, entropies: torch.Tensor) -> list[int]:
    """Numbers of tokens, ascending; ``entropies`` are those after 1, 2, ... of them."""
    candidates = entropies[sequence.begin - 1 :]
    if not len(candidates):
        return [len(sequence.tokens)]
    found = candidates.topk(min(PLACES, len(candidates))).indices + sequence.begin
    return sorted(found.tolist())


def _asked(sequences: Sequence[ProbeSequence], places: Sequence[list[int]], device: torch.device) -> Row:
    starts = _starts(sequences)
    predict = [np.array(own) - 1 + start for own, start in zip(places, starts, strict=True)]
    return _row(sequences, np.concatenate(predict), [], device)


def _starts(sequences: Sequence[ProbeSequence]) -> np.ndarray:
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    starts: np.ndarray = np.cumsum(lengths) - lengths
    return starts


def _row(sequences: Sequence[ProbeSequence], predict: np.ndarray, targets: list[int], device: torch.device) -> Row:
    tokens = np.concatenate([sequence.tokens for sequence in sequences]).astype(np.int64)
    lengths = [len(sequence.tokens) for sequence in sequences]
    return make_row(tokens, lengths, predict, np.array(targets, np.int64), device)

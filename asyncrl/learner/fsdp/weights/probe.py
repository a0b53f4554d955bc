"""The probe: log-probs of a few sequences by the learner's weights, scored at each publication.

An engine that serves the same weights gives the sequences' tokens the same log-probs within rounding. At the run's
temperature the engine samples each next token with the log-prob that the probe has for the token. An engine with other
log-probs has other weights, or computes otherwise.

A place of a sequence is a number of tokens after which the engine samples the next token. All ranks score the same
rows, so that their collectives stay in step, without a gradient. The weights are sharded again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.fsdp.model.policy import Further, Policy, make_row
from asyncrl.messages.weights import Probe

PLACES = 4
"""Most places of a sequence at which an engine samples a token."""
LIKELIEST = 128
"""Least number of tokens with log-probs at each place: an engine mostly samples one of them there."""


def score_probe(
    policy: Policy,
    sequences: Sequence[ProbeSequence],
    *,
    temperature: float,
    packed: bool,
    device: torch.device,
    least: int = 0,
) -> Probe:
    """All ranks together: score the sequences of the probe with the present weights, in rows as in training.

    The sequences' own tokens are scored at temperature 1, as engines score them. At each place, the likeliest tokens
    are scored at ``temperature``, at least ``least`` of them. Places are chosen by largest entropy: where one token is
    certain, a wrong temperature would not show.
    """
    count = min(max(LIKELIEST, least), policy.model.get_output_embeddings().weight.shape[0])
    logprobs, places, likeliest, likeliest_logprobs = [], [], [], []
    for row in [sequences] if packed else [[sequence] for sequence in sequences]:
        lengths = [len(sequence.tokens) for sequence in row]
        own = np.concatenate([sequence.tokens for sequence in row]).astype(np.int64)
        # Each position predicts the next token. A sequence's last one predicts a token of another, and is not used.
        made = make_row(own, lengths, np.arange(len(own)), np.roll(own, -1), device)
        chosen: list[list[int]] = []
        find = find_likeliest(partial(_choose, row, lengths, chosen), temperature, count)
        with torch.no_grad():
            scored, _, tokens, values = policy(made, 1.0, find)
        logprobs += [each[:-1] for each in torch.split(scored, lengths)]
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


def find_likeliest(choose: Callable[[Tensor], Tensor], temperature: float, count: int) -> Further:
    """Make the function that finds the ``count`` likeliest next tokens at some of a row's positions.

    ``choose`` maps the entropies, float32 [N], to the chosen positions, int64 [C]. The function returns the tokens of
    each, int64 [C, count], and their log-probs at ``temperature``, float32 [C, count], nats.
    """

    def find(entropies: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        scaled = logits(choose(entropies)).float() / temperature
        values, tokens = scaled.topk(count, dim=-1)
        return tokens, values - torch.logsumexp(scaled, dim=-1, keepdim=True)

    return find


def _choose(row: Sequence[ProbeSequence], lengths: list[int], chosen: list[list[int]], entropies: Tensor) -> Tensor:
    """Choose the places of each sequence of a row by ``entropies``, and append them to ``chosen``.

    Returns the positions in the row whose next token is sampled there, int64.
    """
    chosen += map(_choose_places, row, torch.split(entropies, lengths))
    starts = accumulate(lengths[:-1], initial=0)
    positions = [start + place - 1 for start, own in zip(starts, chosen, strict=True) for place in own]
    return torch.tensor(positions, dtype=torch.int64, device=entropies.device)


def _choose_places(sequence: ProbeSequence, entropies: Tensor) -> list[int]:
    """Choose up to PLACES places of a sequence, ascending; ``entropies[i]`` is that of the token after i + 1 tokens.

    A sequence without a token after ``begin`` has one place, behind its last token.
    """
    candidates = entropies[sequence.begin - 1 : -1]
    if not len(candidates):
        return [len(sequence.tokens)]
    places = candidates.topk(min(PLACES, len(candidates))).indices + sequence.begin
    return sorted(places.tolist())

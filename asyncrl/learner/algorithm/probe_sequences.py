"""Probe sequences: the learner and the engines score them, and the log-probs must agree.

Before the first step of each start they are the run's prompts, then prompts with responses. Invariant: the same step
chooses the same sequences. Each fits into the smallest context that an engine may have, with room for one sampled
token. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.messages.groups import Group, Trajectory

SEQUENCES = 8
"""Largest number of sequences in a probe."""
LENGTH = 128
"""Largest number of tokens in a sequence."""


class ProbeSequence(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt and a response, at least one. After some of its prefixes engines also sample one token."""

    tokens: list[int]
    begin: int
    """Length of the shortest prefix after which engines sample: at least 1, at most the whole sequence."""


def probe_length(config: Config) -> int:
    """Largest length of a probe sequence: LENGTH, or less if the engines' context has no room for it and one more."""
    return min(LENGTH, config.longest_prompt + config.rollout.max_tokens - 1)


def from_prompts(prompts: Iterable[np.ndarray], length: int) -> list[ProbeSequence]:
    """Take the last ``length`` tokens of each prompt; the second half of them counts as a response."""
    sequences = []
    for prompt in prompts:
        tokens = prompt[-length:].tolist()
        sequences.append(ProbeSequence(tokens, (len(tokens) + 1) // 2))
    return sequences


def from_groups(groups: Sequence[Group], length: int) -> list[ProbeSequence]:
    """Choose up to SEQUENCES responses, from groups spread over the step; several of a group if there are fewer groups.

    Groups without trajectories give none, and no response is chosen twice. Each sequence is the end of a prompt and
    then its response. A response that does not fit loses its end.
    """
    # Pairs of a group's index and the number of the choice, i, which also chooses the sample. So a group that is chosen
    # again gives another sample.
    chosen = {(i * len(groups) // SEQUENCES, i) for i in range(SEQUENCES if groups else 0)}
    picked = {(g, i % len(groups[g].trajectories)) for g, i in chosen if groups[g].trajectories}
    return [_response(groups[g], groups[g].trajectories[sample], length) for g, sample in sorted(picked)]


def _response(group: Group, trajectory: Trajectory, length: int) -> ProbeSequence:
    sequence = trajectory.sequences[0]
    prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
    # If both are long, the prompt gets half of the length. It keeps at least the token that predicts the response.
    response = sequence.tokens[: length - min(len(prompt), max(1, length // 2))]
    # The slice is never [-0:], the whole prompt: the response has left room for at least one token.
    prompt = prompt[-(length - len(response)) :]
    tokens = [*prompt.tolist(), *response.tolist()]
    return ProbeSequence(tokens, len(prompt))

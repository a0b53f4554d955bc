"""Sequences by which engines are held against the learner: real prompts, and from the first step on responses to them.

Invariant: the same step chooses the same sequences; each fits into the smallest context that an engine may have, with a
token to spare for the one that it samples. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.messages.groups import Group, Trajectory

SEQUENCES = 8
LENGTH = 128
"""Tokens of the longest sequence."""


class ProbeSequence(msgspec.Struct, frozen=True, array_like=True):
    """Tokens, one or more, and the least number of them after which an engine is asked to sample the next."""

    tokens: list[int]
    begin: int
    """Least number of tokens before a sampled one: 1 or more, at most all."""


def probe_length(config: Config) -> int:
    """LENGTH, or less where the engines' context is shorter: it needs room for the token that they sample."""
    return min(LENGTH, config.data.max_prompt_tokens + config.rollout.max_tokens - 1)


def from_prompts(prompts: Iterable[np.ndarray], length: int) -> list[ProbeSequence]:
    """End of each prompt, at most ``length`` tokens. The second half counts as a response."""
    found = []
    for prompt in prompts:
        tokens = prompt[-length:].tolist()
        found.append(ProbeSequence(tokens, (len(tokens) + 1) // 2))
    return found


def from_groups(groups: Sequence[Group], length: int) -> list[ProbeSequence]:
    """One response of each of SEQUENCES groups, or several of fewer groups, after the end of its prompt.

    The response's beginning where it does not fit.
    """
    # Another sample of each group, and several of fewer groups.
    chosen = {(i * len(groups) // SEQUENCES, i) for i in range(SEQUENCES if groups else 0)}
    picked = {(g, i % len(groups[g].trajectories)) for g, i in chosen if groups[g].trajectories}
    return [_response(groups[g], groups[g].trajectories[sample], length) for g, sample in sorted(picked)]


def _response(group: Group, trajectory: Trajectory, length: int) -> ProbeSequence:
    sequence = trajectory.sequences[0]
    prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
    # The prompt has half of the length at most, and always a token, from which the response's first is predicted.
    response = sequence.tokens[: length - min(len(prompt), max(1, length // 2))]
    # The number is never 0, which would take the whole prompt: the response has left room for a token.
    prompt = prompt[-(length - len(response)) :]
    tokens = [*prompt.tolist(), *response.tolist()]
    return ProbeSequence(tokens, len(prompt))

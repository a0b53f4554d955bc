"""The nodes of a conversation as the sequences that are trained. Pure.

One sequence for each leaf, in the order of ``nodes``. A trained answer has role ``sampled`` in the first that holds
it and ``repeated`` in later ones; an answer that is not trained is ``repeated`` everywhere. A sequence ends with its
last sampled token, and one without any is left out. Invariant: each token of a trained answer is ``sampled`` once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.groups import Turn, VersionSpan
from asyncrl.rollouter.episode.nodes import Node

_NOT_SAMPLED = -1
"""Version of tokens that the policy did not sample here."""


def sequences_of(nodes: Sequence[Node], past_rewards: Mapping[int, float]) -> list[TokenSequence]:
    """``nodes`` are all of a conversation, parents first; ``past_rewards`` is Turn.past_reward by the node's id."""
    inner = {node.parent for node in nodes}
    held: set[int] = set()
    sequences = []
    for leaf in nodes:
        if leaf in inner:
            continue
        path = leaf.path()
        fresh = {node.id for node in path if node.trained and node.id not in held}
        held |= fresh
        while path and path[-1].id not in fresh:
            path.pop()
        if path:
            sequences.append(_sequence(path, fresh, past_rewards))
    return sequences


def _sequence(path: Sequence[Node], fresh: set[int], past_rewards: Mapping[int, float]) -> TokenSequence:
    prompt = path[0].context
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    # Positions count from behind the prompt, whose tokens have no span.
    end = -len(prompt)
    for node in path:
        begin = end + node.begin
        if begin > max(end, 0):
            spans.append(VersionSpan(_NOT_SAMPLED, end, begin, role="context"))
        end = begin + len(node.ids)
        if node.id in fresh:
            spans.extend(
                VersionSpan(span.version, begin + span.start, begin + span.end, span.mixed_kv) for span in node.spans
            )
            turns.append(Turn(begin, end, past_rewards[node.id]))
        else:
            spans.append(VersionSpan(_NOT_SAMPLED, begin, end, role="repeated"))
    return TokenSequence(
        prompt_ids=prompt,
        tokens=np.concatenate([node.added for node in path])[len(prompt) :],
        logprobs=np.concatenate([node.logprobs for node in path if node.id in fresh]),
        spans=spans,
        turns=turns,
    )


def past_rewards(rewards: Mapping[int, float], lineage: Iterable[int]) -> dict[int, float]:
    """Turn.past_reward of each node. ``lineage`` has for each node, as bits, itself and all that it came after."""
    lines = list(lineage)
    total = sum(rewards.values())
    due = [0.0] * len(lines)
    for rewarded, value in rewards.items():
        line = lines[rewarded]
        while line:
            # The lowest bit is the first node of the line that is left.
            lowest = line & -line
            due[lowest.bit_length() - 1] += value
            line ^= lowest
    return {node: total - brought for node, brought in enumerate(due)}

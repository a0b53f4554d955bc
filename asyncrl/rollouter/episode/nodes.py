"""The tokens of a conversation: a forest of nodes, and the sequences that are trained of it. Pure.

A node is an answer of the policy behind the context that it added. It begins where its parent ends: first the tokens
that others brought since, then those that it sampled. The path to a node is exactly the tokens that the engine was
given for it and sampled. Invariants, asserted when it is made: its path equals the submission; it has one log-prob and
one version for each sampled token. It never changes.

There is one sequence for each leaf, in the order of the nodes. A trained answer has role ``sampled`` in the first
sequence that holds it and ``repeated`` in later ones; an answer that is not trained is ``repeated`` everywhere. A
sequence ends with its last sampled token, and one without any is left out. Invariant: each token of a trained answer is
``sampled`` once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from asyncrl.messages import FinishReason
from asyncrl.messages.episodes import ToolCall
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.groups import Turn, VersionSpan

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
    """Turn.past_reward of each node.

    ``lineage`` has for each node, as bits, itself and every node that it came after.
    """
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """One answer. ``added`` are its context and its sampled tokens, int32; the latter begin at ``begin``."""

    id: int
    """Its index in the conversation, in the order of answers."""
    number: int
    """Number of its call, in the order in which calls were made, however long each took."""
    parent: Node | None
    """The answer that its context continues, token by token."""
    added: np.ndarray
    begin: int
    shared: int
    """Tokens that its prompt began with and an earlier call had, too."""
    length: int
    """Tokens of the path up to its end."""
    logprobs: np.ndarray
    """Log-probs of the sampled tokens: float32, nats."""
    spans: tuple[VersionSpan, ...]
    """Version spans of the sampled tokens, counted from the first of them."""
    finish: FinishReason
    message: dict[str, Any]
    """The answer in OpenAI's form; reasoning is in ``reasoning_content``."""
    tool_calls: tuple[ToolCall, ...]
    trained: bool
    cause: str
    """Cause by which its prompt is as it is; see Prompt."""

    @property
    def context(self) -> np.ndarray:
        """Tokens (int32) between the parent's end and its first sampled token."""
        return self.added[: self.begin]

    @property
    def ids(self) -> np.ndarray:
        """Tokens (int32) that were sampled."""
        return self.added[self.begin :]

    def for_template(self) -> dict[str, Any]:
        """``message`` with the arguments of calls as objects, as chat templates want them, where they are such."""
        if not self.tool_calls:
            return self.message
        calls = [
            {**call, "function": {**call["function"], "arguments": _object_or_text(call["function"]["arguments"])}}
            for call in self.message["tool_calls"]
        ]
        return {**self.message, "tool_calls": calls}

    def path(self) -> list[Node]:
        """Nodes from the first answer to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_ids(self) -> np.ndarray:
        """Tokens on its path: int32 [length]."""
        return np.concatenate([node.added for node in self.path()])

    def check(self, submitted: Sequence[int], sampled: Sequence[int]) -> None:
        """Check the invariants."""
        assert len(sampled) > 0, "an answer has tokens"
        assert self.begin + len(self.ids) == len(self.added)
        whole = np.array([*submitted, *sampled], np.int32)
        assert np.array_equal(self.path_ids(), whole), "the path is what was submitted and sampled"
        assert self.length == len(whole)
        assert len(self.logprobs) == len(sampled), "one log-prob for each sampled token"
        ends = [0, *(span.end for span in self.spans)]
        assert ends[-1] == len(sampled), "one version for each sampled token"
        assert all(
            span.start == end < span.end and span.version >= 0 and span.role == "sampled"
            for span, end in zip(self.spans, ends, strict=False)
        ), "version spans are contiguous and of sampled tokens"


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def shared_prefix(
    ids: np.ndarray, children: dict[Node | None, list[Node]], parent: Node | None, preferred: Node | None = None
) -> tuple[Node | None, int]:
    """The deepest node, below ``parent`` or itself, whose whole path ``ids`` begins with; and the tokens shared.

    The latter count also tokens shared with a part of a node. ``parent`` must be a prefix. Among nodes of equal depth
    ``preferred`` is taken, else one that is trained, else the first.
    """
    best, shared = parent, parent.length if parent else 0
    open_nodes = [parent]
    while open_nodes:
        above = open_nodes.pop()
        offset = above.length if above else 0
        for child in children.get(above, ()):
            same = offset + common_length(child.added, ids[offset:])
            shared = max(shared, same)
            if same == child.length:
                open_nodes.append(child)
                best = max(best, child, key=lambda node: _rank(node, preferred))
    return best, shared


def _rank(node: Node | None, preferred: Node | None) -> tuple[int, bool, bool, int]:
    return (node.length, node is preferred, node.trained, -node.id) if node else (0, False, False, 0)


def depth_first(children: Mapping[Node | None, Sequence[Node]]) -> list[Node]:
    """All nodes, those behind one node by what their calls asked, and in the order of the calls where that is equal.

    So the order does not depend on how long anything took.
    """
    found: list[Node] = []
    open_nodes: list[Node | None] = [None]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None:
            found.append(node)
        below = sorted(children.get(node, ()), key=lambda child: (child.context.tobytes(), child.number))
        open_nodes.extend(reversed(below))
    return found


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    # argmax is 0 also where nothing differs.
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length

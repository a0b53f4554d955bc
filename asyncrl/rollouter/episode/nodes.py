"""The tokens of a conversation: a forest of nodes, and the sequences that are trained from it. Pure.

A node is one answer of the policy with its context. Its tokens follow those of its parent. First comes the *context*:
tokens that the policy did not sample, such as messages of users and tools. Then come the sampled tokens. The *path* of
a node is the tokens of its ancestors and its own: exactly what the engine received and sampled for this answer. A node
never changes. When it is made, it asserts that its path equals the submission and that each sampled token has a
log-prob and a version.

``sequences_of`` makes one sequence for each leaf, in the order of the nodes. A trained answer has the role ``sampled``
in the first sequence that contains it and ``repeated`` in later ones. An answer that is not trained is ``repeated``
everywhere. A sequence ends with its last ``sampled`` token, and one without such tokens is left out. Invariant: each
token of a trained answer is ``sampled`` once.
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
from asyncrl.messages.token_sets import TokenSets, join_sets

_NOT_SAMPLED = -1
"""Version in the spans of tokens whose role is not ``sampled``."""


def sequences_of(nodes: Sequence[Node], past_rewards: Mapping[int, float]) -> list[TokenSequence]:
    """Make the sequences to be trained: one for each leaf whose path has a trained answer that no earlier path has.

    ``nodes`` are all nodes of a conversation, parents first; ``past_rewards`` is Turn.past_reward by the node's id.
    """
    inner = {node.parent for node in nodes}
    earlier_ids: set[int] = set()
    sequences = []
    for leaf in nodes:
        if leaf in inner:
            continue
        path = leaf.path()
        new_ids = {node.id for node in path if node.trained and node.id not in earlier_ids}
        earlier_ids |= new_ids
        while path and path[-1].id not in new_ids:
            path.pop()
        if path:
            sequences.append(_sequence(path, new_ids, past_rewards))
    return sequences


def _sequence(path: Sequence[Node], new_ids: set[int], past_rewards: Mapping[int, float]) -> TokenSequence:
    """Join the nodes of a path to one sequence; the answers whose ids are in ``new_ids`` get the role ``sampled``."""
    prompt = path[0].context
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    # Positions count from the end of the prompt, whose tokens have no span.
    end = -len(prompt)
    for node in path:
        begin = end + node.begin
        if begin > max(end, 0):
            spans.append(VersionSpan(_NOT_SAMPLED, end, begin, role="context"))
        end = begin + len(node.ids)
        if node.id in new_ids:
            spans.extend(
                VersionSpan(span.version, begin + span.start, begin + span.end, span.mixed_kv) for span in node.spans
            )
            turns.append(Turn(begin, end, past_rewards[node.id]))
        else:
            spans.append(VersionSpan(_NOT_SAMPLED, begin, end, role="repeated"))
    return TokenSequence(
        prompt_ids=prompt,
        tokens=np.concatenate([node.added for node in path])[len(prompt) :],
        logprobs=np.concatenate([node.logprobs for node in path if node.id in new_ids]),
        spans=spans,
        turns=turns,
        sets=join_sets(node.sets for node in path if node.id in new_ids),
        routes=_routes(path),
    )


def _routes(path: Sequence[Node]) -> np.ndarray | None:
    """Routes of all tokens of a path but the last; None if one of its answers came without."""
    parts = [node.routes for node in path if node.routes is not None]
    return np.concatenate(parts) if len(parts) == len(path) else None


def past_rewards(rewards: Mapping[int, float], lineage: Iterable[int]) -> dict[int, float]:
    """Compute Turn.past_reward of each node: all rewards except its own and those of the nodes after it, added up.

    ``rewards`` are by node. Bit k of ``lineage[n]`` is set if node n is node k or comes after it
    (``Conversation._lineage``). Nodes of parallel branches do not come after one another.
    """
    lineages = list(lineage)
    total = sum(rewards.values())
    # For each node: its own reward and those of the nodes after it.
    own_and_later = [0.0] * len(lineages)
    for rewarded, value in rewards.items():
        bits = lineages[rewarded]
        while bits:
            # The loop takes the bits from the lowest to the highest.
            lowest = bits & -bits
            own_and_later[lowest.bit_length() - 1] += value
            bits ^= lowest
    return {node: total - subtracted for node, subtracted in enumerate(own_and_later)}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """One answer of the policy."""

    id: int
    """Index in the conversation, in the order in which calls were answered."""
    number: int
    """Number of its call, in the order in which calls were made."""
    parent: Node | None
    """The answer that its context continues, token by token."""
    added: np.ndarray
    """The context and the sampled tokens: int32."""
    begin: int
    """Index in ``added`` of the first sampled token."""
    shared: int
    """Length of the longest prefix that its prompt shares with an earlier call (tokens)."""
    length: int
    """Length of its path (tokens)."""
    logprobs: np.ndarray
    """Log-probs of the sampled tokens: float32, nats."""
    sets: TokenSets | None
    """The sets from which they were sampled; None if the distribution was not truncated."""
    spans: tuple[VersionSpan, ...]
    """Version spans of the sampled tokens, counted from the first of them."""
    routes: np.ndarray | None
    """Routes (messages/routes.py) of the path's tokens from the parent's last one on; without a parent, from the first.
    The last token of the path has no route. None if the engine returns no routes."""
    finish: FinishReason
    message: dict[str, Any]
    """The answer in OpenAI's form; reasoning is in ``reasoning_content``."""
    tool_calls: tuple[ToolCall, ...]
    trained: bool
    cause: str
    """How its prompt relates to earlier ones; see ``conversation.Cause``."""

    @property
    def context(self) -> np.ndarray:
        """Tokens (int32) between the parent's last token and the first sampled one."""
        return self.added[: self.begin]

    @property
    def ids(self) -> np.ndarray:
        """The sampled tokens (int32)."""
        return self.added[self.begin :]

    def for_template(self) -> dict[str, Any]:
        """Return ``message`` as chat templates expect it: tool arguments that are JSON objects become dicts."""
        if not self.tool_calls:
            return self.message
        calls = [
            {**call, "function": {**call["function"], "arguments": _object_or_text(call["function"]["arguments"])}}
            for call in self.message["tool_calls"]
        ]
        return {**self.message, "tool_calls": calls}

    def path(self) -> list[Node]:
        """Return the nodes from the first answer to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_ids(self) -> np.ndarray:
        """Return the tokens of the path: int32 [length]."""
        return np.concatenate([node.added for node in self.path()])

    def check(self, submitted: Sequence[int], sampled: Sequence[int]) -> None:
        """Assert the invariants: the path is what was submitted and sampled, with log-probs and versions."""
        assert len(sampled) > 0, "an answer has tokens"
        assert self.begin + len(self.ids) == len(self.added)
        whole = np.array([*submitted, *sampled], np.int32)
        assert np.array_equal(self.path_ids(), whole), "the path is what was submitted and sampled"
        assert self.length == len(whole)
        assert len(self.logprobs) == len(sampled), "one log-prob for each sampled token"
        assert self.sets is None or len(self.sets.sizes) == len(sampled), "one set for each sampled token"
        above = self.parent.length - 1 if self.parent else 0
        assert self.routes is None or len(self.routes) == self.length - 1 - above, (
            "one route for each token but the last"
        )
        ends = [0, *(span.end for span in self.spans)]
        assert ends[-1] == len(sampled), "one version for each sampled token"
        assert all(
            span.start == end < span.end and span.version >= 0 and span.role == "sampled"
            for span, end in zip(self.spans, ends, strict=False)
        ), "version spans are contiguous and of sampled tokens"


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    """Decode arguments that are a JSON object; return others unchanged."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def shared_prefix(
    ids: np.ndarray, children: dict[Node | None, list[Node]], parent: Node | None, preferred: Node | None = None
) -> tuple[Node | None, int]:
    """Find the longest path of a node that is a prefix of ``ids``, among ``parent`` and its descendants.

    ``children`` has the nodes by their parent. Returns that node (None: no path is a prefix), and the length of the
    longest prefix that ``ids`` shares with any path. This shared prefix may end within a node. The path of ``parent``
    must be a prefix (None: all nodes are searched). Among paths of equal length ``preferred`` wins, else a trained
    node, else the first.
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
    """Return the key by which ``shared_prefix`` compares nodes: the highest is the best."""
    return (node.length, node is preferred, node.trained, -node.id) if node else (0, False, False, 0)


def depth_first(children: Mapping[Node | None, Sequence[Node]]) -> list[Node]:
    """Return all nodes, depth first. Siblings are sorted by context, then in the order in which their calls were made.

    So the order does not depend on the order of the answers.
    """
    nodes: list[Node] = []
    open_nodes: list[Node | None] = [None]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None:
            nodes.append(node)
        below = sorted(children.get(node, ()), key=lambda child: (child.context.tobytes(), child.number))
        open_nodes.extend(reversed(below))
    return nodes


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    # argmax is 0 also without a difference.
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length

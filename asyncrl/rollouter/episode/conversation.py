"""The conversation of one episode: keeps its token ids, log-probs and versions, each once. Pure.

A call of the policy takes three steps here, and everything that takes time lies between them:

1. ``resolve`` finds the newest answer of the policy in the call's messages, its *parent*, and the messages after it.
2. The caller renders. If the call ``extends`` its parent, it renders the new messages alone and calls ``extend``. Else,
   or if the renderer allows no extension, it renders all messages and calls ``branch``. Both return the Prompt for the
   engine.
3. ``commit`` makes the answer sampled for that prompt a node (nodes.py).

A prompt that does not continue its parent token by token is a *fork*. Calls may overlap, since nodes are only added and
never change. Where the messages continue an answer, its sampled tokens are not encoded again. If a rendering gives an
answer's tokens only in part, or differently, that answer is not on the new path. So each sampled token keeps the
context it was sampled in.

Invariants: those of nodes.py; a sealed conversation never changes. Raises EpisodeOver once sealed. Raises
InvalidRequest for a reward of a turn that was not answered, and for a reward that is not finite or too large.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncrl.core.errors import EpisodeOver, InvalidRequest
from asyncrl.messages import FinishReason
from asyncrl.messages.episodes import ToolCall
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.reward import LARGEST
from asyncrl.messages.token_sets import TokenSets
from asyncrl.rollouter.episode.message_tree import MessageTree, Point, digest, is_answer, message_digest, minted_id
from asyncrl.rollouter.episode.nodes import Node, depth_first, past_rewards, sequences_of, shared_prefix
from asyncrl.text.chat.chat_messages import Message

Cause = Literal[
    "root",
    "extend",
    "fork:root",
    "fork:branch",
    "fork:edited",
    "fork:assistant",
    "fork:history",
    "fork:cut",
    "fork:no-extension",
]
"""How a prompt relates to earlier ones.

``root``: it is the first of the conversation. ``extend``: it continues the tokens of an answer. Otherwise it is a fork,
for one of these reasons:

* ``root``: it has other tools or template options;
* ``branch``: its messages continue no answer, for example those of a repeated question, a sub-agent or a summary;
* ``edited``: messages before an answer of the policy were changed;
* ``assistant``: it has an assistant message that the policy did not give here;
* ``history``: under ``history = "template"`` the template renders an earlier answer otherwise than it was sampled;
* ``cut``: an answer was cut by a limit, and the template cannot continue that;
* ``no-extension``: the template cannot continue an answer for another reason.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ResolvedCall:
    """The result of ``resolve``: where a call's messages belong in the conversation."""

    messages: Sequence[Message]
    """All messages, to be rendered; answers as the policy gave them, because agents drop reasoning and rewrite JSON."""
    parent: Node | None
    """The policy's last answer in the messages; None without any."""
    tail: Sequence[Message]
    """The messages after ``parent``; all messages without a parent."""
    extends: bool
    """Whether the renderer should first try to extend ``parent`` by ``tail``."""
    fork: Cause
    """Cause of the fork, if the prompt turns out to be one."""
    before: tuple[Node, ...]
    """Answers that this call comes after: those to the longest prefix of its messages that an earlier call had."""
    root: bytes
    """Digest of the call's tools and template options, which names a root of the message tree."""
    point: Point | None
    """Point of the message tree after the last known message."""
    unknown: Sequence[Message]
    """The messages after that point."""
    digests: Sequence[bytes]
    """Digests of the unknown messages."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompt:
    """A prompt for the engine."""

    ids: list[int]
    """All tokens of the prompt."""
    parent: Node | None
    """The answer whose whole path the prompt begins with; None without one."""
    cause: Cause
    shared: int
    """Length of the longest prefix that it shares with an earlier call (tokens)."""
    number: int
    """Index of the prompt in the order in which prompts were made."""
    resolved: ResolvedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationCounts:
    """Counts of a conversation, for metrics."""

    turns: int
    """Number of answers, including those that are not trained."""
    forks: dict[str, int]
    """Forks by their cause, without ``fork:``."""
    sampled_tokens: int
    context_tokens: int
    """Number of tokens in all prompts, without the prefixes shared with earlier calls."""
    linear_tokens: int
    """Number of tokens that would have been prefilled and sampled if each call had continued the one before it."""

    @property
    def cost_factor(self) -> float:
        """Number of tokens prefilled and sampled, divided by ``linear_tokens``; 1 without forks."""
        return (self.context_tokens + self.sampled_tokens) / self.linear_tokens if self.linear_tokens else 1.0


class Conversation:
    """The conversation of one attempt at one trajectory.

    ``history`` is ChatConfig.history, which here only chooses between ``fork:history`` and ``fork:no-extension``.
    """

    def __init__(self, *, history: Literal["sampled", "template"] = "sampled") -> None:
        self.nodes: list[Node] = []
        """The answers, in the order in which the calls were answered."""
        self.rewards: dict[int, float] = {}
        """Rewards of turns, by node."""
        self.over: str | None = None
        """Why the conversation is sealed; None while it is open."""
        self._history = history
        self._tree = MessageTree()
        self._points: list[Point] = []
        """The point of the message tree after each node's message."""
        self._children: dict[Node | None, list[Node]] = {}
        """Nodes by their parent; None for those without one."""
        self._lineage: list[int] = []
        """For each node a bit mask: bit k is set if the node is node k or comes after it.

        A node comes after its parent, the answers in its call's ``ResolvedCall.before``, and the nodes before them."""
        self._forks: Counter[str] = Counter()
        self._prompts = itertools.count()
        """Numbers for the next prompts."""
        self._context_tokens = self._sampled_tokens = self._linear_tokens = 0
        """Counts as in ConversationCounts; so is ``_forks``."""

    def resolve(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ResolvedCall:
        """Find the policy's last answer in ``messages``, and the messages after it. The caller must not change them.

        Raises EpisodeOver; ChatRefused on messages nested too deeply.
        """
        self._require_open()
        root = digest([tools, options], "tools")
        digests = [message_digest(message, f"messages[{number}]") for number, message in enumerate(messages)]
        point = self._tree.deepest(root, messages, digests)
        known = point.path() if point else []
        answers = [each for each in known if each.node]
        parent = answers[-1].node if answers else None
        tail = messages[answers[-1].depth :] if answers else messages
        assistant_follows = any(is_answer(message) for message in tail)
        unknown = messages[len(known) :]
        return ResolvedCall(
            messages=[*(_as_given(each) for each in known), *unknown],
            parent=parent,
            tail=tail,
            extends=parent is not None and not assistant_follows,
            fork=self._fork_cause(root, parent, unknown, assistant_follows),
            before=_preceding_answers(known, len(messages)),
            root=root,
            point=point,
            unknown=unknown,
            digests=digests[len(known) :],
        )

    def _fork_cause(
        self, root: bytes, parent: Node | None, unknown: Sequence[Message], assistant_follows: bool
    ) -> Cause:
        """Find the cause that a fork would have. ``assistant_follows``: an assistant message follows ``parent``."""
        if not self._tree.has_root(root):
            return "fork:root" if self.nodes else "root"
        if parent is not None and not assistant_follows:
            if parent.finish != "stop":
                return "fork:cut"
            return "fork:history" if self._history == "template" else "fork:no-extension"
        if answer := next((message for message in unknown if is_answer(message)), None):
            return "fork:edited" if self._tree.was_said(answer) else "fork:assistant"
        # With a parent, its tail has an assistant message that is known from an earlier call.
        return "fork:branch" if parent is None else "fork:assistant"

    def extend(self, resolved: ResolvedCall, extension: Sequence[int]) -> Prompt:
        """Make the prompt from the parent's path and ``extension``, the renderer's token ids for the tail."""
        assert resolved.extends
        assert resolved.parent is not None
        path = resolved.parent.path_ids()
        ids = np.concatenate([path, np.array(extension, np.int32)])
        _, shared = shared_prefix(ids, self._children, resolved.parent)
        return self._prompt(ids.tolist(), resolved.parent, "extend", shared, resolved)

    def branch(self, resolved: ResolvedCall, ids: Sequence[int]) -> Prompt:
        """Make the prompt from ``ids``, the rendering of all messages.

        Its cause is ``extend`` if it still continues the parent's tokens and no assistant message follows the parent.
        """
        assert len(ids) > 0, "a prompt has tokens"
        parent, shared = shared_prefix(np.array(ids, np.int32), self._children, None, resolved.parent)
        continues = parent is not None and parent is resolved.parent
        assistant_follows = any(is_answer(message) for message in resolved.tail)
        cause: Cause = "extend" if continues and not assistant_follows else resolved.fork
        return self._prompt(list(ids), parent, cause, shared, resolved)

    def _prompt(self, ids: list[int], parent: Node | None, cause: Cause, shared: int, resolved: ResolvedCall) -> Prompt:
        number = next(self._prompts)
        return Prompt(ids=ids, parent=parent, cause=cause, shared=shared, number=number, resolved=resolved)

    def commit(
        self,
        prompt: Prompt,
        *,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        sets: TokenSets | None = None,
        finish: FinishReason,
        content: str,
        reasoning: str | None = None,
        calls: Sequence[tuple[str, str]] = (),
        untrained: bool = False,
        routes: np.ndarray | None = None,
    ) -> Node:
        """Add the answer sampled for ``prompt`` as a node, and return the node.

        It has at least one token; ``spans`` count from its first token. ``calls`` are (name, arguments as JSON) of the
        tools that it calls; they get ids here. An ``untrained`` answer stays in the context of later ones, but is not
        trained. ``routes`` are those of Node. Raises EpisodeOver.
        """
        self._require_open()
        node_id = len(self.nodes)
        minted = tuple(
            ToolCall(id=minted_id(node_id, index), name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(calls)
        )
        # The node keeps only the prompt's tokens after its parent's path; ``begin`` is their number.
        begin = len(prompt.ids) - (prompt.parent.length if prompt.parent else 0)
        added = np.array([*prompt.ids[len(prompt.ids) - begin :], *tokens], np.int32)
        scores = np.array(logprobs, np.float32)
        added.setflags(write=False)
        scores.setflags(write=False)
        node = Node(
            id=node_id,
            number=prompt.number,
            parent=prompt.parent,
            added=added,
            begin=begin,
            shared=prompt.shared,
            length=len(prompt.ids) + len(tokens),
            logprobs=scores,
            sets=sets,
            spans=tuple(spans),
            routes=routes,
            finish=finish,
            message=_message(content, reasoning, minted),
            tool_calls=minted,
            trained=not untrained,
            cause=self._final_cause(prompt),
        )
        node.check(prompt.ids, tokens)
        self._register(node, prompt)
        return node

    def _final_cause(self, prompt: Prompt) -> Cause:
        """Return the prompt's final cause: a "root" becomes a fork if an overlapping call was answered before it."""
        if prompt.cause != "root" or not self.nodes:
            return prompt.cause
        return "fork:branch" if self._tree.has_root(prompt.resolved.root) else "fork:root"

    def _register(self, node: Node, prompt: Prompt) -> None:
        """Add a new node to the message tree, with the call's unknown messages, and to the lineage; count it."""
        resolved = prompt.resolved
        self.nodes.append(node)
        self._children.setdefault(node.parent, []).append(node)
        point = self._tree.add(resolved.root, resolved.point, resolved.unknown, resolved.digests, node)
        self._points.append(point)
        lineage = 1 << node.id
        for earlier in (node.parent, *resolved.before):
            lineage |= self._lineage[earlier.id] if earlier else 0
        self._lineage.append(lineage)
        kind, _, cause = node.cause.partition(":")
        if kind == "fork":
            self._forks[cause] += 1
        context = len(prompt.ids) - prompt.shared
        longest = max((earlier.length for earlier in resolved.before), default=0)
        self._context_tokens += context
        self._sampled_tokens += len(node.ids)
        # At most ``context``, the tokens computed: another branch may share more tokens than the calls before this one.
        self._linear_tokens += min(context, max(len(prompt.ids) - longest, 0)) + len(node.ids)

    def reward(self, node: int | None, value: float) -> int:
        """Set the reward of a turn, and return the turn's number.

        ``node`` None means the newest trained turn, or the newest turn if none is trained. A second value replaces the
        first. Raises InvalidRequest, EpisodeOver.
        """
        self._require_open()
        # ``not ... <=`` also refuses nan.
        if not abs(value) <= LARGEST:
            raise InvalidRequest(f"the reward of a turn is {value:g}; a finite number up to {LARGEST:g} is expected")
        if node is None:
            newest = self._newest_trained()
            if newest is None:
                raise InvalidRequest("a reward came before the first answer; there is no turn to credit")
            node = newest.id
        if not 0 <= node < len(self.nodes):
            raise InvalidRequest(f"a reward is for turn {node}; the policy has given {len(self.nodes)} answers")
        self.rewards[node] = value
        return node

    def seal(self, reason: str) -> None:
        """End the conversation: nothing is added any more; the first reason stays."""
        self.over = self.over or reason

    def sequences(self) -> list[TokenSequence]:
        """The sequences to be trained, by ``nodes.sequences_of``; empty if no answer is trained.

        Their order does not depend on the order in which overlapping calls were made or answered.
        """
        return sequences_of(depth_first(self._children), past_rewards(self.rewards, self._lineage))

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages up to the answer ``last``, with the policy's reasoning; empty without an answer."""
        return self._messages_to(self.last) if self.last else []

    def branches(self) -> list[list[dict[str, Any]]]:
        """Return the messages up to each trained answer that no other answer comes after; leaves out ``last``."""
        # Bits of the answers that another answer comes after.
        followed = 0
        for node, lineage in zip(self.nodes, self._lineage, strict=True):
            followed |= lineage & ~(1 << node.id)
        ends = [node for node in self.nodes if node.trained and node is not self.last and not followed >> node.id & 1]
        return [self._messages_to(node) for node in ends]

    def _messages_to(self, node: Node) -> list[dict[str, Any]]:
        """Return the messages up to an answer, with it."""
        return [dict(point.message) for point in self._points[node.id].path() if point.message is not None]

    @property
    def last(self) -> Node | None:
        """The answer to the call that was made last, among the trained answers if there are any; None without one."""
        nodes = [node for node in self.nodes if node.trained] or self.nodes
        return max(nodes, key=lambda node: node.number, default=None)

    def counts(self) -> ConversationCounts:
        """Return the counts so far."""
        return ConversationCounts(
            turns=len(self.nodes),
            forks=dict(self._forks),
            sampled_tokens=self._sampled_tokens,
            context_tokens=self._context_tokens,
            linear_tokens=self._linear_tokens,
        )

    def _newest_trained(self) -> Node | None:
        """Return the newest trained answer, or the newest answer if no answer is trained; None before the first."""
        return next((node for node in reversed(self.nodes) if node.trained), self.nodes[-1] if self.nodes else None)

    def _require_open(self) -> None:
        if self.over is not None:
            raise EpisodeOver(self.over)


def _preceding_answers(known: Sequence[Point], messages: int) -> tuple[Node, ...]:
    """Find the answers that a call comes after. ``messages`` counts its messages, ``known`` are their known points.

    The search begins at the deepest point. It ends at an answer that is in the messages, and returns that answer. It
    also ends at a point where the policy answered earlier calls, and returns all answers there.
    """
    for point in reversed(known):
        if point.node:
            return (point.node,)
        if point.answers and point.depth < messages:
            return tuple(answer.node for answer in point.answers if answer.node)
    return ()


def _as_given(point: Point) -> Message:
    """Return the message of a point: an answer as the policy gave it, any other message as the agent sent it first."""
    assert point.message is not None
    return point.node.for_template() if point.node else point.message


def _message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Make the message of an answer, in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call.in_message() for call in calls]
    return message

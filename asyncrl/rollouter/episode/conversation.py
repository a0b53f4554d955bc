"""The conversation of one episode: the only home of its token ids, log-probs and versions. Pure.

A call of the policy takes three steps here, and everything that takes time lies between them:

1. ``resolve``: the answer that the messages continue, and the new messages behind it.
2. The caller renders: where ``extends`` what is new alone (``extend``); else, or where the renderer allows no
   extension, all of the messages (``branch``). Both give the Prompt that the engine is to have.
3. ``commit``: the answer sampled for that prompt becomes a node.

Calls may overlap, since nodes are only added and never change: what a call has resolved stays true over commits
meanwhile. Sampled tokens are never encoded again where the messages continue them. An answer whose tokens a rendering
gives only in part, or otherwise, is no part of the new path; so each sampled token keeps the context it was sampled in.

Invariants: those of nodes.py; a sealed conversation never changes. Raises EpisodeOver once sealed, InvalidRequest on a
reward for a node that was not answered, or that is not finite.
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
from asyncrl.rollouter.episode.message_tree import MessageTree, Point, digest, is_answer, message_digest, minted_id
from asyncrl.rollouter.episode.nodes import Node, depth_first, past_rewards, sequences_of, shared_prefix
from asyncrl.text.chat.messages import Message

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
"""Cause by which a prompt is as it is.

``root``: the first of the conversation. ``extend``: it continues the tokens of an answer. A fork shares with earlier
calls no more than the tokens that happen to be equal, because:

* ``root``: it has other tools or template options;
* ``branch``: its messages continue no answer, as the same again, a sub-agent or a summary;
* ``edited``: what comes before an answer of ours was changed;
* ``assistant``: it holds an answer that was not sampled here;
* ``history``: under ``history = "template"`` the template renders an earlier answer otherwise than it was sampled;
* ``cut``: an answer was cut by a limit, and the template cannot continue that;
* ``no-extension``: the template cannot continue an answer for another reason.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ResolvedCall:
    """The place of a call's messages in the conversation."""

    messages: Sequence[Message]
    """All messages, to be rendered, with our answers as they were given: agents drop reasoning and rewrite JSON."""
    parent: Node | None
    """The last answer of ours in them, recognised at its place."""
    tail: Sequence[Message]
    """The messages behind it; all messages where there is no such answer."""
    extends: bool
    """Whether the renderer is asked for an extension of ``parent`` by ``tail`` before anything else."""
    fork: Cause
    """Cause of its fork, if it forks."""
    before: tuple[Node, ...]
    """Answers to the longest part of the messages that was asked before: this call comes after them."""
    root: bytes
    point: Point | None
    """Point behind the last message that is known."""
    unknown: Sequence[Message]
    """The messages behind that point."""
    digests: Sequence[bytes]
    """Digests of the unknown messages."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompt:
    """The tokens that the engine is to continue."""

    ids: list[int]
    """All tokens of the prompt."""
    parent: Node | None
    """The answer whose path it begins with."""
    cause: Cause
    shared: int
    """Tokens that it begins with and an earlier call has, too."""
    number: int
    """Number of the prompts before it."""
    resolved: ResolvedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFigures:
    """Figures of a conversation."""

    turns: int
    """Answers, also those that are not trained."""
    forks: dict[str, int]
    """Forks by their cause, without ``fork:``."""
    sampled_tokens: int
    context_tokens: int
    """Tokens that prompts brought beyond what earlier calls have."""
    linear_tokens: int
    """Tokens that would have been prefilled and sampled had each call gone on from the one it comes after."""

    @property
    def cost_factor(self) -> float:
        """Tokens prefilled and sampled, over ``linear_tokens``; 1 without forks."""
        return (self.context_tokens + self.sampled_tokens) / self.linear_tokens if self.linear_tokens else 1.0


class Conversation:
    """One attempt at one trajectory.

    ``history`` is as in ChatConfig: the renderer keeps to it, here forks are named by it.
    """

    def __init__(self, *, history: Literal["sampled", "template"] = "sampled") -> None:
        self.nodes: list[Node] = []
        self.rewards: dict[int, float] = {}
        """Rewards of turns, by node."""
        self.over: str | None = None
        """Reason that it is sealed."""
        self._history = history
        self._tree = MessageTree()
        self._points: list[Point] = []
        self._children: dict[Node | None, list[Node]] = {}
        self._lineage: list[int] = []
        """Bits, for each node, of itself and of every node that it comes after."""
        self._forks: Counter[str] = Counter()
        self._prompts = itertools.count()
        self._context = self._sampled = self._linear = 0

    def resolve(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ResolvedCall:
        """Find the answer that ``messages`` continue. They are kept, and must not be changed.

        Raises EpisodeOver; ChatRefused on messages nested too deeply.
        """
        self._require_open()
        root = digest([tools, options], "tools")
        digests = [message_digest(message, f"messages[{number}]") for number, message in enumerate(messages)]
        point = self._tree.deepest(root, messages, digests)
        known = point.path() if point else []
        places = [place for place in known if place.node]
        parent = places[-1].node if places else None
        tail = messages[places[-1].depth :] if places else messages
        answered = any(is_answer(message) for message in tail)
        unknown = messages[len(known) :]
        return ResolvedCall(
            messages=[*(_as_given(place) for place in known), *unknown],
            parent=parent,
            tail=tail,
            extends=parent is not None and not answered,
            fork=self._fork(root, parent, unknown, answered),
            before=_before(known, len(messages)),
            root=root,
            point=point,
            unknown=unknown,
            digests=digests[len(known) :],
        )

    def _fork(self, root: bytes, parent: Node | None, unknown: Sequence[Message], answered: bool) -> Cause:
        if not self._tree.has_root(root):
            return "fork:root" if self.nodes else "root"
        if parent is not None and not answered:
            if parent.finish != "stop":
                return "fork:cut"
            return "fork:history" if self._history == "template" else "fork:no-extension"
        if answer := next((message for message in unknown if is_answer(message)), None):
            return "fork:edited" if self._tree.was_said(answer) else "fork:assistant"
        return "fork:branch" if parent is None else "fork:assistant"

    def extend(self, resolved: ResolvedCall, extension: Sequence[int]) -> Prompt:
        """The prompt that continues the answer, ``extension`` being the renderer's for its tail."""
        assert resolved.extends
        assert resolved.parent is not None
        path = resolved.parent.path_ids()
        ids = np.concatenate([path, np.array(extension, np.int32)])
        _, shared = shared_prefix(ids, self._children, resolved.parent)
        return self._prompt(ids.tolist(), resolved.parent, "extend", shared, resolved)

    def branch(self, resolved: ResolvedCall, ids: Sequence[int]) -> Prompt:
        """The prompt that is ``ids``, the rendering of all messages. It may turn out to continue an answer."""
        assert len(ids) > 0, "a prompt has tokens"
        parent, shared = shared_prefix(np.array(ids, np.int32), self._children, None, resolved.parent)
        goes_on = parent is not None and parent is resolved.parent
        answered = any(is_answer(message) for message in resolved.tail)
        cause: Cause = "extend" if goes_on and not answered else resolved.fork
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
        finish: FinishReason,
        content: str,
        reasoning: str | None = None,
        calls: Sequence[tuple[str, str]] = (),
        untrained: bool = False,
    ) -> Node:
        """Keep an answer: at least one token, its log-probs, its spans counted from its first token.

        ``calls`` are names and arguments (JSON) of the tools that it calls; their ids are minted here. Raises
        EpisodeOver.
        """
        self._require_open()
        number = len(self.nodes)
        minted = tuple(
            ToolCall(id=minted_id(number, index), name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(calls)
        )
        begin = len(prompt.ids) - (prompt.parent.length if prompt.parent else 0)
        added = np.array([*prompt.ids[len(prompt.ids) - begin :], *tokens], np.int32)
        scores = np.array(logprobs, np.float32)
        added.setflags(write=False)
        scores.setflags(write=False)
        node = Node(
            id=number,
            number=prompt.number,
            parent=prompt.parent,
            added=added,
            begin=begin,
            shared=prompt.shared,
            length=len(prompt.ids) + len(tokens),
            logprobs=scores,
            spans=tuple(spans),
            finish=finish,
            message=_message(content, reasoning, minted),
            tool_calls=minted,
            trained=not untrained,
            cause=self._settled(prompt),
        )
        node.check(prompt.ids, tokens)
        self._keep(node, prompt)
        return node

    def _settled(self, prompt: Prompt) -> Cause:
        """The prompt's cause, now that calls which began with it may have ended before."""
        if prompt.cause != "root" or not self.nodes:
            return prompt.cause
        return "fork:branch" if self._tree.has_root(prompt.resolved.root) else "fork:root"

    def _keep(self, node: Node, prompt: Prompt) -> None:
        resolved = prompt.resolved
        self.nodes.append(node)
        self._children.setdefault(node.parent, []).append(node)
        point = self._tree.add(resolved.root, resolved.point, resolved.unknown, resolved.digests, node)
        self._points.append(point)
        line = 1 << node.id
        for earlier in (node.parent, *resolved.before):
            line |= self._lineage[earlier.id] if earlier else 0
        self._lineage.append(line)
        kind, _, cause = node.cause.partition(":")
        if kind == "fork":
            self._forks[cause] += 1
        context = len(prompt.ids) - prompt.shared
        longest = max((earlier.length for earlier in resolved.before), default=0)
        self._context += context
        self._sampled += len(node.ids)
        # Never more than was computed: another branch may have brought tokens that the calls before it have not.
        self._linear += min(context, max(len(prompt.ids) - longest, 0)) + len(node.ids)

    def reward(self, node: int | None, value: float) -> int:
        """Credit a turn, by default the newest that is trained; a second value replaces the first. Gives its number.

        Raises InvalidRequest, EpisodeOver.
        """
        self._require_open()
        # Put so, it refuses nan, too.
        if not abs(value) <= LARGEST:
            raise InvalidRequest(f"the reward of a turn is {value:g}; a finite number up to {LARGEST:g} is expected")
        if node is None:
            newest = self._newest()
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
        """The sequences to be trained, as sequences.py makes them; empty where nothing is trained.

        Calls at the same time may be made and answered in any order; the order of the sequences does not follow it.
        """
        return sequences_of(depth_first(self._children), past_rewards(self.rewards, self._lineage))

    def messages(self) -> list[dict[str, Any]]:
        """The main line: the messages up to ``last``, with the reasoning of answers of ours; empty without any."""
        return self._line(self.last) if self.last else []

    def branches(self) -> list[list[dict[str, Any]]]:
        """The messages up to each other trained answer that no other answer comes after."""
        # Bits of the answers that another one comes after.
        gone_on = 0
        for node, line in zip(self.nodes, self._lineage, strict=True):
            gone_on |= line & ~(1 << node.id)
        ends = [node for node in self.nodes if node.trained and node is not self.last and not gone_on >> node.id & 1]
        return [self._line(node) for node in ends]

    def _line(self, node: Node) -> list[dict[str, Any]]:
        """The messages up to an answer."""
        return [dict(point.message) for point in self._points[node.id].path() if point.message is not None]

    @property
    def last(self) -> Node | None:
        """The answer to the call that was made last, of those that are trained; of all where none is."""
        nodes = [node for node in self.nodes if node.trained] or self.nodes
        return max(nodes, key=lambda node: node.number, default=None)

    def counts(self) -> ConversationFigures:
        """Figures as they are now."""
        return ConversationFigures(
            turns=len(self.nodes),
            forks=dict(self._forks),
            sampled_tokens=self._sampled,
            context_tokens=self._context,
            linear_tokens=self._linear,
        )

    def _newest(self) -> Node | None:
        return next((node for node in reversed(self.nodes) if node.trained), self.nodes[-1] if self.nodes else None)

    def _require_open(self) -> None:
        if self.over is not None:
            raise EpisodeOver(self.over)


def _before(known: Sequence[Point], messages: int) -> tuple[Node, ...]:
    """The answers at the deepest point before the end of the messages; the answer alone that they themselves hold."""
    for point in reversed(known):
        if point.node:
            return (point.node,)
        if point.answers and point.depth < messages:
            return tuple(answer.node for answer in point.answers if answer.node)
    return ()


def _as_given(place: Point) -> Message:
    assert place.message is not None
    return place.node.for_template() if place.node else place.message


def _message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call.in_message() for call in calls]
    return message

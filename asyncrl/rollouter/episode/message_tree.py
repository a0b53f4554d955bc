"""The messages of a conversation as the agent sends them, in a tree. Each *point* of it lies after a message. Pure.

Each request sends its whole history again. ``MessageTree.deepest`` walks from the root along the request's messages,
and recognises each message:

* an answer of the policy with tool calls, by the calls' ids ``call_<node>_<k>``, which are assigned here, and by the
  tools' names; its reasoning, its text and the JSON form of the arguments may have changed;
* an answer of the policy without tool calls, by its text, without surrounding blanks;
* every other message, by all of its fields.

An id is unique within one conversation only, so the tool's name must match, too. A message counts as an answer of the
policy only after the messages with which the policy was called. Invariant: points are only added, so a found point
stays right. Fails with ChatRefused on messages nested too deeply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from asyncrl.core.errors import ChatRefused
from asyncrl.messages.episodes import ToolCall
from asyncrl.rollouter.episode.nodes import Node
from asyncrl.text.chat.chat_messages import Message

_DIGEST_BYTES = 16


def minted_id(node: int, call: int) -> str:
    """Make the id of a tool call: the ``call``-th of the answer ``node``."""
    return f"call_{node}_{call}"


def digest(value: Any, field: str) -> bytes:
    """Return a digest of a JSON value, independent of the order of keys. Raises ChatRefused, which names ``field``."""
    try:
        text = msgspec.json.encode(value, order="deterministic")
    except UnicodeEncodeError:
        # The value has half of a surrogate pair, which JSON can escape and UTF-8 cannot encode.
        text = json.dumps(value, sort_keys=True).encode()
    except RecursionError:
        raise ChatRefused(field, "is nested too deeply") from None
    return blake2b(text, digest_size=_DIGEST_BYTES).digest()


def message_digest(message: Message, field: str) -> bytes:
    """Return the digest that recognises a message that the policy did not sample; fields of None count as absent."""
    return digest({key: value for key, value in message.items() if value is not None}, field)


def is_answer(message: Message) -> bool:
    """Whether a message has the role ``assistant``."""
    return bool(message["role"] == "assistant")


@dataclass(slots=True, eq=False)
class Point:
    """A place in the tree, after ``message``. A root has no message and no parent."""

    parent: Point | None
    message: Message | None
    node: Node | None = None
    """The node, if the message is an answer of the policy."""
    depth: int = 0
    """Number of messages up to here."""
    other_messages: dict[bytes, Point] = field(default_factory=dict)
    """Next points whose message the policy did not sample, by the message's digest."""
    answers: list[Point] = field(default_factory=list)
    """Next points whose message is an answer of the policy, in the order of answers."""

    def path(self) -> list[Point]:
        """Return the points from the first message on to this one."""
        points = []
        point: Point | None = self
        while point is not None and point.parent is not None:
            points.append(point)
            point = point.parent
        return points[::-1]


class MessageTree:
    """The tree. It has a root for each combination of tools and template options, named by their digest."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Point] = {}
        self._texts: set[str] = set()
        """Texts of all answers without tool calls."""
        self._calls: dict[str, tuple[Point, ToolCall]] = {}
        """All tool calls of the policy, by id, each with the point of its answer."""

    def has_root(self, root: bytes) -> bool:
        """Whether a call with this root was answered."""
        return root in self._roots

    def deepest(self, root: bytes, messages: Sequence[Message], digests: Sequence[bytes]) -> Point | None:
        """Walk from ``root`` along ``messages`` while they are known; returns the last point reached.

        ``digests`` are those of the messages. Returns None if there is no such root. If several points match, it
        returns the one that ``_next`` yields first.
        """
        start = self._roots.get(root)
        if start is None:
            return None
        reached = [start]
        for message, identity in zip(messages, digests, strict=True):
            # Answers of equal text are at different points. The next message may follow any of them, so the walk takes
            # all.
            following = [point for place in reached for point in self._next(place, message, identity)]
            if not following:
                break
            reached = following
        return reached[0]

    def _next(self, point: Point, message: Message, identity: bytes) -> Iterator[Point]:
        """Yield the points to which ``message`` leads from ``point``: answers of the policy, then another message.

        Order of answers without tool calls: exact text first, then trained, then newest.
        """
        if is_answer(message):
            if calls := message.get("tool_calls"):
                answer = self._answer_by_calls(calls)
                if answer is not None and answer.parent is point:
                    yield answer
            else:
                yield from _answers_with_text(point.answers, _text(message))
        other = point.other_messages.get(identity)
        if other is not None:
            yield other

    def _answer_by_calls(self, calls: Sequence[Mapping[str, Any]]) -> Point | None:
        """Return the answer that made all given tool calls, and perhaps others; None without such an answer."""
        answers = [self._answer_by_call(call) for call in calls]
        return answers[0] if all(answer is answers[0] for answer in answers) else None

    def _answer_by_call(self, call: Mapping[str, Any]) -> Point | None:
        # An agent may send equal ids from another conversation, so the tool's name must match too.
        point, minted = self._calls.get(str(call.get("id")), (None, None))
        return point if minted and minted.name == (call.get("function") or {}).get("name") else None

    def was_said(self, message: Message) -> bool:
        """Whether the policy gave this answer anywhere in the conversation."""
        if calls := message.get("tool_calls"):
            return self._answer_by_calls(calls) is not None
        return _text(message).strip() in self._texts

    def add(
        self, root: bytes, point: Point | None, messages: Sequence[Message], digests: Sequence[bytes], node: Node
    ) -> Point:
        """Add ``messages`` after ``point`` (None: the root), then the answer ``node``; returns the answer's point.

        Messages that an overlapping call has added meanwhile are shared.
        """
        if point is None:
            point = self._roots.setdefault(root, Point(None, None))
        for message, identity in zip(messages, digests, strict=True):
            following = point.other_messages.get(identity)
            if following is None:
                following = Point(point, message, depth=point.depth + 1)
                point.other_messages[identity] = following
            point = following
        answer = Point(point, node.message, node, point.depth + 1)
        point.answers.append(answer)
        if node.tool_calls:
            self._calls.update((call.id, (answer, call)) for call in node.tool_calls)
        else:
            self._texts.add(_text(node.message).strip())
        return answer


def _answers_with_text(answers: Sequence[Point], text: str) -> list[Point]:
    """Return the answers without tool calls that have this text, apart from blanks around it, in ``_next``'s order."""
    stripped = text.strip()
    same = []
    # The newest first: the stable sort below keeps this order among equal matches.
    for answer in reversed(answers):
        node = answer.node
        assert node is not None
        if not node.tool_calls and _text(node.message).strip() == stripped:
            # False sorts before True, so exact text and trained answers come first.
            same.append((_text(node.message) != text, not node.trained, answer))
    return [answer for _, _, answer in sorted(same, key=lambda entry: entry[:2])]


def _text(message: Message) -> str:
    """Return the content of a message if it is a text, else ""."""
    content = message.get("content")
    return content if isinstance(content, str) else ""

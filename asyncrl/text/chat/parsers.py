"""Parsers that split the whole text of an answer into reasoning, content and calls of tools. Pure.

Invariant: reasoning is removed first, so a call that it quotes does not count. A call that cannot be read stays in the
content, where the agent sees it, and is counted. No text of a model makes a parser fail. A parser is a callable, so an
inference engine can provide its own (rollouter/engines/vllm/vllm_parser.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.text.chat.chat_messages import Tool, read_json

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_CALLS = re.compile(rf"{CALL}(.*?)(?:{END_CALL}|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer, split into its parts."""

    content: str
    reasoning: str | None = None
    """Text of the reasoning; None without one."""
    calls: list[ParsedCall] = field(default_factory=list)
    malformed: int = 0
    """Calls that were begun and cannot be read; their text is part of the content."""
    unfinished: bool = False
    """Whether the answer ended within its reasoning."""


class AnswerParser(Protocol):
    """Reads one of the forms in which models answer."""

    markers: frozenset[str] | None
    """Special tokens that must stay in the text for this parser, while others are left out; None keeps all."""

    def __call__(
        self,
        text: str,
        tools: Sequence[Tool],
        *,
        thinking: bool = False,
        ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Parsed:
        """Split the text of an answer into its parts. Without ``tools`` no call is parsed.

        ``thinking``: whether the prompt has opened the reasoning already. ``ids`` are the tokens of the text, if it is
        a whole answer. ``options`` are those of the template.
        """


class NoParser:
    """Parser that takes the whole text as content."""

    markers: frozenset[str] | None = frozenset()

    def __call__(self, text: str, tools: Sequence[Tool], *, thinking: bool = False, **_: Any) -> Parsed:
        return Parsed(text)


class ThinkParser:
    """Parser of ``<think>reasoning</think>`` in front of the content, opened by the model or by the prompt."""

    markers: frozenset[str] | None = frozenset((THINK, END_THINK))

    def __call__(self, text: str, tools: Sequence[Tool], *, thinking: bool = False, **_: Any) -> Parsed:
        before, opened, rest = text.partition(THINK)
        if opened and not before.strip():
            text, thinking = rest, True
        if not thinking:
            return Parsed(text)
        reasoning, ended, content = text.partition(END_THINK)
        return Parsed(content.lstrip("\n"), reasoning=reasoning.strip("\n") or None, unfinished=not ended)


class JsonCallParser:
    """Parser of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the form of Hermes and Qwen.

    The tag may also hold a list of such calls. A tag without its end reaches to the end of the text.
    """

    markers: frozenset[str] | None = frozenset((CALL, END_CALL))

    def __call__(self, text: str, tools: Sequence[Tool], *, thinking: bool = False, **_: Any) -> Parsed:
        if not tools or CALL not in text:
            return Parsed(text)
        calls: list[ParsedCall] = []
        malformed = 0

        def take(match: re.Match[str]) -> str:
            nonlocal malformed
            found = _read_calls(match[1])
            calls.extend(found)
            malformed += not found
            return "" if found else match[0]

        content = _CALLS.sub(take, text)
        return Parsed(content.strip() if calls else content, calls=calls, malformed=malformed)


class Both:
    """Combines two parsers: the first reads the reasoning, the second the calls in the rest.

    An answer that ends within its reasoning has no calls.
    """

    def __init__(self, reasoning: AnswerParser, calls: AnswerParser) -> None:
        self._reasoning, self._calls = reasoning, calls
        of_reasoning, of_calls = reasoning.markers, calls.markers
        self.markers: frozenset[str] | None = (
            None if of_reasoning is None or of_calls is None else of_reasoning | of_calls
        )

    def __call__(
        self,
        text: str,
        tools: Sequence[Tool],
        *,
        thinking: bool = False,
        ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Parsed:
        split = self._reasoning(text, tools, thinking=thinking, ids=ids, options=options)
        if split.unfinished:
            return split
        # ``ids`` belong to the whole text, so they fit only if no reasoning was removed.
        ids_of_rest = ids if split.content == text else ()
        rest = self._calls(split.content, tools, ids=ids_of_rest, options=options)
        return replace(
            rest,
            reasoning=split.reasoning if split.reasoning is not None else rest.reasoning,
            calls=[*split.calls, *rest.calls],
            malformed=split.malformed + rest.malformed,
        )


def write_calls(calls: Sequence[dict[str, Any]]) -> str:
    """Write the calls of a message as JsonCallParser reads them, for templates that leave calls out."""
    return "\n".join(f"{CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END_CALL}" for call in calls)


def _read_calls(text: str) -> list[ParsedCall]:
    """Read a call, or a list of calls, from a JSON text. Returns an empty list if any of them is invalid."""
    value = read_json(text)
    each = [one if isinstance(one, dict) else {} for one in (value if isinstance(value, list) else [value])]
    calls = [make_call(one.get("name"), one.get("arguments", {})) for one in each]
    return [call for call in calls if call is not None] if None not in calls else []


def make_call(name: Any, arguments: Any) -> ParsedCall | None:
    """Make a call from its name and its arguments, an object or JSON text; None if it is not valid."""
    if isinstance(arguments, str):
        # Some models write the object as a JSON string.
        arguments = read_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()
    except ValueError:
        # No message can hold NaN, infinity or half of a surrogate pair.
        return None
    return ParsedCall(name, written)


EngineParsers = Callable[[str | None, str | None], AnswerParser]
"""Function that makes an engine's parser from the names of its parser of calls and of its reasoning parser."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parser of a model's answers, and the names of its parts for calls and for reasoning."""

    tools: str
    reasoning: str
    parser: AnswerParser
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def thinks(self) -> bool:
        """Whether answers may have reasoning."""
        return self.reasoning != "none"

"""Renders conversations by the chat template of a model, in the form that this template takes.

At the start, small test conversations are rendered to learn the form: how the template takes text, calls and reasoning.
Invariant: a rendered text depends on messages, tools and options alone. Fails with ChatRefused on a conversation that
the template refuses, with ConfigError if the model has no template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from asyncrl.core.errors import ChatRefused, ConfigError
from asyncrl.text.chat.chat_messages import REASONING, Message, Tool
from asyncrl.text.chat.parsers import END_THINK, THINK, write_calls
from asyncrl.text.tokenizer import Tokenizer

SHORT_ID = 9
"""Characters of a short id of a call: Mistral's templates refuse any other length."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_NAME = "qkzcall"
_TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "qkztool",
            "description": "q",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "q"}}},
        },
    }
]
"""A tool that has every field that a template may read."""
_USER: Message = {"role": "user", "content": "q"}
_MARKED: Message = {"role": "user", "content": _NAME}


class ChatTemplate:
    """Renders conversations, and knows the tokens that end an answer.

    ``end_ids`` are the tokens at which the engine stops. Raises ConfigError if the model has no template.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int], *, path: str = "the model") -> None:
        if tokenizer.template_text(with_tools=False) is None:
            problem = f"{path} has no chat template, and episodes are chats; take a model that has one, or put "
            raise ConfigError([f"model.path: {problem}chat_template.jinja into its folder"])
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        texts = ((tokenizer.decode([id], keep_special=True), id) for id in sorted(self.end_ids))
        self.ends = {text: id for text, id in texts if text and _encoded(tokenizer, text) == [id]}
        """Ids of the tokens that end an answer, by their text; only those whose text encodes to them."""
        self._short_ids = False
        """Whether the template takes only ids of calls with SHORT_ID letters and digits (``_shorten``)."""
        self._arguments_as_text = False
        """Whether the template must get the arguments of calls as JSON text."""
        self._as_parts = False
        """Whether the template shows content only if it is a list of text parts."""
        self._reasoning_key = REASONING[0]
        """Field of a message from which the template reads reasoning."""
        self.shows_reasoning = False
        """Whether the template writes the reasoning of any answer, or its generation prompt opens one."""
        self.writes_calls = True
        """Whether the template writes the calls of an earlier answer; otherwise ``text`` puts them into its content."""
        self._learn()

    def _learn(self) -> None:
        """Render small conversations to find the form in which the template takes text, calls and their ids."""
        asked_in_parts = _MARKED | {"content": [{"type": "text", "text": _NAME}]}
        self._as_parts = _NAME not in self._try_text([_MARKED], ()) and _NAME in self._try_text([asked_in_parts], ())
        asked = [_USER, _call("call_0_0")]
        answered = [*asked, _result("call_0_0")]
        # Try arguments as objects and as text, and long and short ids. Keep the first form that the template takes.
        for self._arguments_as_text, self._short_ids in product((False, True), repeat=2):
            # A template without tojson writes an object as Python does; such a template needs text.
            if (text := self._try_text(answered)) and "{'q': 'q'}" not in text:
                break
        else:
            self._arguments_as_text = self._short_ids = False
        self.writes_calls = _NAME in self._try_text(asked)
        without_tools = self._try_text([_USER], ())
        self.shows_tools = bool(without_tools) and self._try_text([_USER]) not in ("", without_tools)
        """Whether the template shows tools to the model."""
        self._learn_reasoning()

    def _learn_reasoning(self) -> None:
        """Find the field from which the template writes reasoning, or whether its generation prompt opens one."""
        for key in REASONING:
            plain = {"role": "assistant", "content": "q", key: _NAME}
            called = _call("call_0_0", "f") | {key: _NAME}
            if _NAME in self._try_text([_USER, plain]) + self._try_text([_USER, called, _result("call_0_0", "f")]):
                self._reasoning_key, self.shows_reasoning = key, True
                return
        try:
            prompt = self.text([_USER])
        except ChatRefused:
            return
        self.shows_reasoning = prompt.rfind(THINK) > prompt.rfind(END_THINK)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generate: bool = True,
    ) -> str:
        """Render a conversation as the model sees it. With ``generate`` the text ends where an answer must begin.

        ``options`` are further arguments of the template. Raises ChatRefused if the template refuses the conversation,
        and ConfigError if the template cannot be compiled.
        """
        converted = [self._convert(message) for message in messages]
        try:
            return self.tokenizer.render_chat(converted, tools, options, generate=generate)
        except ConfigError:
            raise
        except ValueError as error:
            raise ChatRefused("messages", str(error)) from None

    def ids(self, text: str) -> list[int]:
        """Encode a text. Raises ChatRefused."""
        try:
            return self.tokenizer.encode(text)
        except ValueError as error:
            raise ChatRefused("messages", str(error)) from None

    def first_end(self, text: str) -> tuple[int, str] | None:
        """Find the first end token in a text. Returns its index and its text; of several at one index, the longest."""
        found = [(at, -len(end), end) for end in self.ends if (at := text.find(end)) >= 0]
        if not found:
            return None
        at, _, end = min(found)
        return at, end

    def _convert(self, message: Message) -> Message:
        """Convert a message to the form that this template takes, as ``_learn`` has found it."""
        calls = message.get("tool_calls")
        if calls and not self.writes_calls:
            content = "\n".join(text for text in (message["content"], write_calls(calls)) if text)
            message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
        elif calls and self._short_ids:
            message = message | {"tool_calls": [call | {"id": _shorten(call["id"])} for call in calls]}
        elif self._short_ids and "tool_call_id" in message:
            message = message | {"tool_call_id": _shorten(message["tool_call_id"])}
        if self._arguments_as_text and "tool_calls" in message:
            message = message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if self._reasoning_key != REASONING[0] and REASONING[0] in message:
            message = dict(message)
            message[self._reasoning_key] = message.pop(REASONING[0])
        if self._as_parts and isinstance(message["content"], str):
            message = message | {"content": [{"type": "text", "text": message["content"]}]}
        return message

    def _try_text(self, messages: Sequence[Message], tools: Sequence[Tool] = _TOOLS) -> str:
        """Render a test conversation; empty if the template refuses it."""
        try:
            return self.text(messages, tools, generate=False)
        except ChatRefused:
            return ""


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text; empty if the vocabulary lacks a part of it."""
    try:
        return tokenizer.encode(text)
    except ValueError:
        return []


def _shorten(id: str) -> str:
    """Return a short id for a long one, by a hash, so that different ids stay different."""
    digest = hashlib.blake2b(id.encode(), digest_size=SHORT_ID).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as JSON text."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _call(id: str, name: str = _NAME) -> Message:
    function = {"name": name, "arguments": {"q": "q"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def _result(id: str, name: str = _NAME) -> Message:
    return {"role": "tool", "content": "q", "tool_call_id": id, "name": name}

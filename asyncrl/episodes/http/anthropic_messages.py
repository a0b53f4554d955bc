"""Anthropic's Messages.

Source: https://docs.anthropic.com/en/api/messages. Blocks become messages. Results of tools become messages of the role
tool, in order, before the text of the same message. Thinking that is sent back is left out, because the rollouter has
the sampled tokens. A stream sends each block of the content from its start to its stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.core.errors import ChatRefused
from asyncrl.episodes.http.dialect import (
    MESSAGES,
    Body,
    ChatRequest,
    Failure,
    Stamp,
    error_type,
    event,
    flag,
    joined_text,
    mapping,
    objects,
    review,
    strict_tools,
    string,
    strings,
    whole,
)
from asyncrl.messages.episodes import ChatReply, ToolCall

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
FORGOTTEN = ("thinking", "redacted_thinking")
"""Types of blocks that are ignored when they are sent back."""


class AnthropicMessages:
    """The dialect of Anthropic's Messages."""

    def parse(self, body: Body) -> ChatRequest:
        """Check the fields of a body, and translate system text, messages and tools. Raises ChatRefused."""
        flagged = strict_tools(body) | {"messages.is_error": any(map(_has_error_result, objects(body, "messages")))}
        ignored, relaxed = review(body | flagged, MESSAGES, nested=("tool_choice", "output_config"))
        tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(objects(body, "tools"))]
        messages: list[Body] = []
        if system := joined_text(body.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        for at, each in enumerate(given := objects(body, "messages")):
            messages.extend(_messages(each, f"messages[{at}]"))
        if not given:
            raise ChatRefused("messages", "must hold at least one")
        if given[-1]["role"] == "assistant":
            raise ChatRefused(f"messages[{len(given) - 1}]", "must be the user's: no answer is begun for the policy")
        return ChatRequest(
            messages=messages,
            # To forbid tool calls, show the policy no tools.
            tools=[] if mapping(body, "tool_choice").get("type") == "none" else tools,
            template_options=mapping(body, "chat_template_kwargs"),
            max_tokens=whole(body, "max_tokens"),
            stop=strings(body, "stop_sequences"),
            stream=flag(body, "stream"),
            ignored=ignored,
            relaxed=relaxed,
        )

    def reply(self, asked: ChatRequest, stamp: Stamp, replies: Sequence[ChatReply]) -> Body:
        """Return the body of the whole answer: blocks for thinking, text and tool calls, and the usage."""
        (reply,) = replies
        blocks: list[Body] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            blocks.append({"type": "text", "text": reply.content})
        blocks.extend(_tool_use(call, msgspec.json.decode(call.arguments)) for call in reply.tool_calls)
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
        return _message(stamp) | {"content": blocks, "usage": usage} | _ended(reply)

    def events(self, asked: ChatRequest, stamp: Stamp) -> MessageEvents:
        return MessageEvents(stamp)

    def failure(self, failure: Failure) -> Body:
        error = {"type": error_type(failure.status), "message": failure.message}
        return {"type": "error", "error": error | ({"code": failure.code} if failure.code else {})}


class MessageEvents:
    """Makes the events of a streamed message, as ReplyStream says."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._sent = 0
        """Number of characters of the content that were sent."""
        self._blocks = 0
        """Number of blocks that have begun."""
        self._begun = False
        """Whether the event for the begin of the message was made."""

    def text(self, choice: int, text: str) -> bytes:
        begin = b"" if self._sent else self._begin() + self._start({"type": "text", "text": ""})
        self._sent += len(text)
        return begin + self._delta({"type": "text_delta", "text": text})

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """Return the events for the rest: unsent text, thinking, tool calls, the stop reason and the usage.

        Blocks come one after another. So a text block that is open ends first, even if the answer has thinking.
        """
        (reply,) = replies
        parts = [self._begin()]
        if self._sent:
            parts.append(self._text_rest(reply))
        if reply.reasoning:
            thinking = {"type": "thinking_delta", "thinking": reply.reasoning}
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            parts += [self._start(empty), self._delta(thinking), self._stop()]
        if reply.content and not self._sent:
            parts += [self._start({"type": "text", "text": ""}), self._text_rest(reply)]
        for call in reply.tool_calls:
            parts.append(self._start(_tool_use(call, {})))
            parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
            parts.append(self._stop())
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
        parts += [_event("message_delta", delta=_ended(reply), usage=usage), _event("message_stop")]
        return b"".join(parts)

    def failed(self, failure: Failure) -> bytes:
        return event(AnthropicMessages().failure(failure), "error")

    def _begin(self) -> bytes:
        """Return the first event of the stream, at the first call; then nothing."""
        if self._begun:
            return b""
        self._begun = True
        return _event("message_start", message=_message(self._stamp))

    def _text_rest(self, reply: ChatReply) -> bytes:
        """Return the events for the text that was not sent yet, and for the stop of its block."""
        rest = reply.content[self._sent :]
        return (self._delta({"type": "text_delta", "text": rest}) if rest else b"") + self._stop()

    def _start(self, block: Body) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Body) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def _messages(given: Body, where: str) -> list[Body]:
    """Translate one message of a request into messages of chat completions: tool results first, then the text.

    ``where`` is the message's name for errors. Raises ChatRefused.
    """
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise ChatRefused(f"{where}.role", f"must be user, assistant or system, not {role!r}")
    if not isinstance(content, list):
        return [{"role": role, "content": joined_text(content, f"{where}.content")}]
    texts, calls, results = [], [], []
    for at, block in enumerate(content):
        place = f"{where}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif kind not in FORGOTTEN:
            if kind != "text":
                raise ChatRefused(place, f"is a block of type {kind!r}; the policy takes text alone")
            texts.append(string(block, "text", f"{place}.text"))
    if calls:
        return [{"role": role, "content": "\n".join(texts) or None, "tool_calls": calls}]
    return results + ([{"role": role, "content": "\n".join(texts)}] if texts or not results else [])


def _has_error_result(given: Body) -> bool:
    content = given.get("content")
    return isinstance(content, list) and any(
        isinstance(each, dict) and each.get("is_error") is True for each in content
    )


def _call(block: Body, place: str) -> Body:
    names = {name: string(block, name, f"{place}.{name}") for name in ("id", "name")}
    arguments = msgspec.json.encode(mapping(block, "input")).decode()
    return {"id": names["id"], "type": "function", "function": {"name": names["name"], "arguments": arguments}}


def _result(block: Body, place: str) -> Body:
    of = string(block, "tool_use_id", f"{place}.tool_use_id")
    return {"role": "tool", "tool_call_id": of, "content": joined_text(block.get("content"), f"{place}.content")}


def _tool(tool: Body, where: str) -> Body:
    if tool.get("type", "custom") not in ("custom", None):
        raise ChatRefused(f"{where}.type", f"can only be 'custom', not {tool['type']!r}")
    function: Body = {"name": string(tool, "name", f"{where}.name")}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = mapping(tool, "input_schema")
    return {"type": "function", "function": function}


def _tool_use(call: ToolCall, arguments: Any) -> Body:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ended(reply: ChatReply) -> Body:
    if reply.finish_reason == "stop" and reply.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_sequence}
    return {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _message(stamp: Stamp) -> Body:
    """Return the body of an answer that has no content yet."""
    return {
        "id": f"msg_{stamp.number}",
        "type": "message",
        "role": "assistant",
        "model": stamp.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _event(kind: str, **facts: Any) -> bytes:
    return event({"type": kind, **facts}, kind)

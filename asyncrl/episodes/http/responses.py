"""OpenAI's Responses, without state: each request holds the whole conversation.

Source: https://platform.openai.com/docs/api-reference/responses. Items become messages. A message of the assistant and
the calls behind it become one message, as the policy sampled them. Reasoning that is sent back is left out, because the
rollouter has the sampled tokens. A stream sends each item of the output from its addition to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.core.errors import ChatRefused
from asyncrl.episodes.http.dialect import (
    RESPONSES,
    Body,
    ChatRequest,
    Failure,
    Stamp,
    event,
    flag,
    joined_text,
    mapping,
    objects,
    openai_failure,
    review,
    strict_tools,
    string,
    whole,
)
from asyncrl.messages.episodes import ChatReply, ToolCall

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ROLES = ("system", "developer", "user", "assistant")


class Responses:
    """The dialect of OpenAI's Responses."""

    def parse(self, body: Body) -> ChatRequest:
        """Check the fields of a body, and translate instructions, input and tools. Raises ChatRefused."""
        ignored, relaxed = review(body | strict_tools(body), RESPONSES, nested=("text", "reasoning"))
        tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(objects(body, "tools"))]
        messages = _messages(body)
        if instructions := joined_text(body.get("instructions"), "instructions"):
            messages.insert(0, {"role": "system", "content": instructions})
        if not messages:
            raise ChatRefused("input", "must hold at least one message")
        return ChatRequest(
            messages=messages,
            # To forbid tool calls, show the policy no tools.
            tools=[] if body.get("tool_choice") == "none" else tools,
            template_options=mapping(body, "chat_template_kwargs"),
            max_tokens=whole(body, "max_output_tokens"),
            stream=flag(body, "stream"),
            ignored=ignored,
            relaxed=relaxed,
            echo={name: body.get(name) for name in ("instructions", "max_output_tokens", "metadata")}
            | {"tools": objects(body, "tools")},
        )

    def reply(self, asked: ChatRequest, stamp: Stamp, replies: Sequence[ChatReply]) -> Body:
        (reply,) = replies
        return _finished(asked, stamp, reply, _items(stamp, reply))

    def events(self, asked: ChatRequest, stamp: Stamp) -> ResponseEvents:
        return ResponseEvents(asked, stamp)

    def failure(self, failure: Failure) -> Body:
        return openai_failure(failure)


class ResponseEvents:
    """Makes the events of a streamed response, as ReplyStream says."""

    def __init__(self, asked: ChatRequest, stamp: Stamp) -> None:
        self._asked, self._stamp = asked, stamp
        self._sequence = 0
        """Number of events made so far."""
        self._sent = ""
        """The part of the content that was sent."""
        self._begun = False
        """Whether the events for the begin of the response were made."""
        self._message_begun = False
        """Whether the item of the message was announced."""

    def text(self, choice: int, text: str) -> bytes:
        self._sent += text
        return self._begin() + self._begin_message(0) + self._delta(0, text)

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """Return the events for all items of the output, without text that was sent, and for the end."""
        (reply,) = replies
        items = _items(self._stamp, reply)
        if self._message_begun:
            # The streamed text was announced as the first item, so the message stays first, before its reasoning.
            items.sort(key=lambda item: item["type"] != "message")
        parts = [self._begin()]
        for at, item in enumerate(items):
            if item["type"] == "message":
                parts.append(self._message(at, item))
            elif item["type"] == "function_call":
                parts.append(self._call(at, item))
            else:
                parts.append(self._reasoning(at, item))
        whole_response = _finished(self._asked, self._stamp, reply, items)
        parts.append(self._event(f"response.{whole_response['status']}", response=whole_response))
        return b"".join(parts)

    def failed(self, failure: Failure) -> bytes:
        error = openai_failure(failure)["error"]
        return self._event("error", code=failure.code, message=failure.message, param=failure.param, error=error)

    def _begin(self) -> bytes:
        """Return the first events of the stream, at the first call; then nothing."""
        if self._begun:
            return b""
        self._begun = True
        response = _response(self._asked, self._stamp) | {"status": "in_progress"}
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def _begin_message(self, at: int) -> bytes:
        """Return the events that announce the message at index ``at`` of the output; nothing after the first call."""
        if self._message_begun:
            return b""
        self._message_begun = True
        empty = _message(self._stamp, "") | {"content": [], "status": "in_progress"}
        return self._added(at, empty) + self._event(
            "response.content_part.added", **self._place(at), content_index=0, part=_output_text("")
        )

    def _message(self, at: int, item: Body) -> bytes:
        """Return the events for the message at index ``at`` of the output: its start if due, unsent text, its end."""
        text = item["content"][0]["text"]
        parts = [self._begin_message(at)]
        if rest := text[len(self._sent) :]:
            parts.append(self._delta(at, rest))
        place = self._place(at) | {"content_index": 0}
        parts.append(self._event("response.output_text.done", **place, text=text, logprobs=[]))
        parts.append(self._event("response.content_part.done", **place, part=_output_text(text)))
        return b"".join([*parts, self._done(at, item)])

    def _delta(self, at: int, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(at), content_index=0, delta=text, logprobs=[])

    def _call(self, at: int, item: Body) -> bytes:
        """Return the events for a tool call at index ``at`` of the output, from its addition to its end."""
        place = {"item_id": item["id"], "output_index": at}
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        return b"".join(
            [
                self._added(at, item | {"arguments": "", "status": "in_progress"}),
                self._event(f"{kind}.delta", **place, delta=arguments),
                self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments),
                self._done(at, item),
            ]
        )

    def _reasoning(self, at: int, item: Body) -> bytes:
        """Return the events for the reasoning at index ``at`` of the output, from its addition to its end."""
        place = {"item_id": item["id"], "output_index": at, "summary_index": 0}
        part = item["summary"][0]
        kind = "response.reasoning_summary"
        return b"".join(
            [
                self._added(at, item | {"summary": []}),
                self._event(f"{kind}_part.added", **place, part=part | {"text": ""}),
                self._event(f"{kind}_text.delta", **place, delta=part["text"]),
                self._event(f"{kind}_text.done", **place, text=part["text"]),
                self._event(f"{kind}_part.done", **place, part=part),
                self._done(at, item),
            ]
        )

    def _place(self, at: int) -> Body:
        """Return the fields that name the message at index ``at`` of the output."""
        return {"item_id": f"msg_{self._stamp.number}", "output_index": at}

    def _added(self, at: int, item: Body) -> bytes:
        return self._event("response.output_item.added", output_index=at, item=item)

    def _done(self, at: int, item: Body) -> bytes:
        return self._event("response.output_item.done", output_index=at, item=item)

    def _event(self, kind: str, **facts: Any) -> bytes:
        encoded = event({"type": kind, "sequence_number": self._sequence, **facts}, kind)
        self._sequence += 1
        return encoded


def _messages(body: Body) -> list[Body]:
    """Translate the input into messages of chat completions. Raises ChatRefused.

    A function call joins the message of the assistant before it, or makes an empty one. Reasoning is left out.
    """
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body["input"]}]
    messages: list[Body] = []
    for at, item in enumerate(objects(body, "input")):
        where = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                if item.get("role") not in ROLES:
                    raise ChatRefused(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {item.get('role')!r}")
                content = joined_text(item.get("content"), f"{where}.content", TEXT_PARTS)
                messages.append({"role": item["role"], "content": content})
            case "function_call":
                names = {name: string(item, name, f"{where}.{name}") for name in ("call_id", "name", "arguments")}
                call = {"id": names["call_id"], "type": "function"}
                call |= {"function": {"name": names["name"], "arguments": names["arguments"]}}  # type: ignore[dict-item]
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = joined_text(item.get("output"), f"{where}.output", TEXT_PARTS)
                call_id = string(item, "call_id", f"{where}.call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                pass
            case kind:
                raise ChatRefused(f"{where}.type", f"{kind!r} is not supported here")
    return messages


def _tool(tool: Body, where: str) -> Body:
    if tool.get("type") != "function":
        raise ChatRefused(f"{where}.type", f"can only be 'function', not {tool.get('type')!r}")
    string(tool, "name", f"{where}.name")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _items(stamp: Stamp, reply: ChatReply) -> list[Body]:
    """Return the items of the output: reasoning if there is any, the message, and the tool calls."""
    items: list[Body] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{stamp.number}", "type": "reasoning", "summary": summary})
    if reply.content or not reply.tool_calls:
        items.append(_message(stamp, reply.content))
    return items + [_function_call(call) for call in reply.tool_calls]


def _message(stamp: Stamp, text: str) -> Body:
    head = {"id": f"msg_{stamp.number}", "type": "message", "role": "assistant", "status": "completed"}
    return {**head, "content": [_output_text(text)]}


def _output_text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: ToolCall) -> Body:
    names = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", **names}


def _response(asked: ChatRequest, stamp: Stamp) -> Body:
    """Return the body of a response that has no output yet."""
    return {
        "id": f"resp_{stamp.number}",
        "object": "response",
        "created_at": stamp.created,
        "model": stamp.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "error": None,
        "incomplete_details": None,
        **asked.echo,
    }


def _finished(asked: ChatRequest, stamp: Stamp, reply: ChatReply, items: list[Body]) -> Body:
    """Return the body of a complete response with these output items."""
    cut = reply.finish_reason == "length"
    return _response(asked, stamp) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }

"""OpenAI's chat completions, the dialect that the policy's own messages are written in.

Source: https://platform.openai.com/docs/api-reference/chat. Reasoning is in ``reasoning_content``, as vLLM and DeepSeek
have it. A stream has the role first, then reasoning, content and calls, the finish reason, the usage where it is
asked for, and [DONE].
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.errors import ChatRefused
from asyncrl.episodes.http.dialect import (
    CHAT_COMPLETIONS,
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
    strings,
    whole,
)
from asyncrl.messages.episodes import ChatReply

MOST_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
DONE = b"data: [DONE]\n\n"


class ChatCompletions:
    """The dialect of chat completions."""

    def parse(self, body: Body) -> ChatRequest:
        """Check the fields, the messages and the tools of a body, and translate it. Raises ChatRefused."""
        ignored, relaxed = review(body | strict_tools(body), CHAT_COMPLETIONS)
        check_messages(messages := objects(body, "messages"))
        check_tools(tools := objects(body, "tools"))
        limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := whole(body, name))]
        return ChatRequest(
            messages=messages,
            # To forbid tool calls, show the policy no tools.
            tools=[] if body.get("tool_choice") == "none" else tools,
            template_options=mapping(body, "chat_template_kwargs"),
            max_tokens=min(limits, default=None),
            stop=strings(body, "stop"),
            n=whole(body, "n", most=MOST_CHOICES) or 1,
            stream=flag(body, "stream"),
            include_usage=flag(mapping(body, "stream_options"), "include_usage"),
            ignored=ignored,
            relaxed=relaxed,
        )

    def reply(self, asked: ChatRequest, stamp: Stamp, replies: Sequence[ChatReply]) -> Body:
        choices = [
            {"index": at, "message": message(reply), "logprobs": None, "finish_reason": reply.finish_reason}
            for at, reply in enumerate(replies)
        ]
        return _head(stamp, "chat.completion") | {"choices": choices, "usage": usage(replies)}

    def events(self, asked: ChatRequest, stamp: Stamp) -> ChatCompletionEvents:
        return ChatCompletionEvents(asked, stamp)

    def failure(self, failure: Failure) -> Body:
        return openai_failure(failure)


class ChatCompletionEvents:
    """Makes the chunks of a streamed chat completion, as ReplyStream says."""

    def __init__(self, asked: ChatRequest, stamp: Stamp) -> None:
        self._head = _head(stamp, "chat.completion.chunk")
        self._usage = asked.include_usage
        self._sent: dict[int, int] = {}
        """By choice that has begun: the number of characters of its content that were sent."""

    def text(self, choice: int, text: str) -> bytes:
        begin = b"" if choice in self._sent else self._chunk(choice, {"role": "assistant", "content": ""})
        self._sent[choice] = self._sent.get(choice, 0) + len(text)
        return begin + self._chunk(choice, {"content": text})

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        parts = [part for choice, reply in enumerate(replies) for part in self._rest(choice, reply)]
        if self._usage:
            parts.append(event(self._head | {"choices": [], "usage": usage(replies)}))
        return b"".join([*parts, DONE])

    def failed(self, failure: Failure) -> bytes:
        return event(openai_failure(failure))

    def _rest(self, choice: int, reply: ChatReply) -> list[bytes]:
        """Return the chunks of a choice that were not sent yet, up to its finish reason."""
        parts = []
        if choice not in self._sent:
            empty = None if reply.tool_calls and not reply.content else ""
            parts.append(self._chunk(choice, {"role": "assistant", "content": empty}))
        if reply.reasoning:
            parts.append(self._chunk(choice, {"reasoning_content": reply.reasoning}))
        if rest := reply.content[self._sent.get(choice, 0) :]:
            parts.append(self._chunk(choice, {"content": rest}))
        for at, call in enumerate(reply.tool_calls):
            opened: Body = {"index": at, **call.in_message()}
            opened["function"] = {"name": call.name, "arguments": ""}
            parts.append(self._chunk(choice, {"tool_calls": [opened]}))
            arguments = {"index": at, "function": {"arguments": call.arguments}}
            parts.append(self._chunk(choice, {"tool_calls": [arguments]}))
        parts.append(self._chunk(choice, {}, reply.finish_reason))
        return parts

    def _chunk(self, choice: int, delta: Body, finish_reason: str | None = None) -> bytes:
        part = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event(self._head | {"choices": [part]} | ({"usage": None} if self._usage else {}))


def check_messages(messages: Sequence[Body]) -> None:
    """Check that each message has a role, and content that the policy can read. Raises ChatRefused."""
    if not messages:
        raise ChatRefused("messages", "must hold at least one")
    for at, each in enumerate(messages):
        if each.get("role") not in ROLES:
            raise ChatRefused(f"messages[{at}].role", f"must be one of {', '.join(ROLES)}, not {each.get('role')!r}")
        joined_text(each.get("content"), f"messages[{at}].content", ("text", "refusal"))


def check_tools(tools: Sequence[Body]) -> None:
    """Check that each tool is a function with a name. Raises ChatRefused."""
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise ChatRefused(f"tools[{at}].type", f"can only be 'function', not {tool.get('type')!r}")
        string(mapping(tool, "function"), "name", f"tools[{at}].function.name")


def message(reply: ChatReply) -> Body:
    """Return the policy's reply as a message of the assistant."""
    made: Body = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        made["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        made |= {"content": reply.content or None, "tool_calls": [call.in_message() for call in reply.tool_calls]}
    return made


def usage(replies: Sequence[ChatReply]) -> Body:
    """Return the numbers of tokens: of the context, which all choices share, and of the answers to all choices."""
    prompt, sampled = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(stamp: Stamp, kind: str) -> Body:
    return {"id": f"chatcmpl-{stamp.number}", "object": kind, "created": stamp.created, "model": stamp.model}

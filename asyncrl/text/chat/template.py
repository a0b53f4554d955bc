"""The chat template of a model: renders conversations and prompts by it, and checks what it shows to the model.

Dataloader, dry run and episodes use these functions, so that the prompt whose tokens are counted is the prompt that is
played. When a ``ChatTemplate`` is made, it renders small test conversations to learn the form that the template takes:
for text, calls and reasoning. Invariants: a rendered text depends on messages, tools and options alone. A prompt passes
only if the model reads all of it. If the last message is the assistant's, the policy continues it, or the prompt is
refused; no second answer follows it.

``ShownCheck`` finds the parts of a conversation that a chat template does not show to the model. It renders the
conversation once more with a made-up word, the mark, in place of each text. If the result lacks a mark, the model would
never read that part, and the conversation is refused. The result depends on the kinds of messages alone, so it is kept
for each kind. A missing mark is no reason to refuse in one case: a template that shows reasoning elsewhere may leave it
out of earlier answers, as it does in use, too. Ids of calls, and the name of the tool in a result, get no mark, since
they only repeat what the call says.

Fails with ChatRefused, which names the field, and with ConfigError if the model has no chat template. With another
data.template than "chat", a prompt of messages raises a plain ValueError. Callers catch ValueError, which ChatRefused
is too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from asyncrl.config import Config
from asyncrl.config.episode import ChatConfig
from asyncrl.config.training import PromptsConfig
from asyncrl.core.errors import ChatRefused, ConfigError
from asyncrl.text.chat.chat_messages import REASONING, Message, Tool, kind_of, read_conversation
from asyncrl.text.chat.parsers import END_THINK, THINK, write_calls
from asyncrl.text.tokenizer import Tokenizer

Prompt = str | list[Message]
"""Text, or chat messages in the form of ``normalise_messages``."""
CONTINUED = "qkzcontinued"
"""Made-up word at the end of the last message, which the policy continues."""
MOST_KEPT = 1024
"""Most kinds of conversations whose result ShownCheck keeps."""
CALLS_LEFT_OUT = (
    "the chat template shows no calls of tools. Take a model whose template does. If the model writes calls as "
    '<tool_call>{...}</tool_call>, set chat.tool_parser = "json"'
)
TOOLS_LEFT_OUT = (
    "the chat template shows no tools. Take a model whose template does, or describe them in a system message and "
    'leave the column out (for prompts: data.tools_key = "")'
)
LEFT_OUT = "the chat template does not show it to the model; {} or take a model whose template does"
"""Problem of any other part that is not shown; it is completed with the advice for the field in CHANGES."""
CHANGES = {
    "name": "put it into the content,",
    "reasoning_content": "put it into the content,",
    "content": "put it into a message that the template shows,",
    "tool_calls": "leave it out,",
    "tools": "leave it out,",
}

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
Missing = tuple[int, str, str]
"""A part that is not shown: index of its message, or -1 for the tools; its path in the message; the problem."""
UNKNOWN: Missing = (0, "", "")
"""Stands for the result of a kind of conversation that is not checked yet."""
SHORT_ID = 9
"""Characters of a short id of a call: Mistral's templates refuse any other length."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_NAME = "qkzcall"
"""Made-up word in test conversations; a rendered text without it does not show the part that has it."""
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


# --- prompts ---


def read_prompt(given: Any, field: str, *, continues: bool) -> Prompt:
    """Check the prompt in column ``field`` and normalise its messages. Raises ChatRefused.

    ``continues`` is data.continue_final_message.
    """
    if isinstance(given, str):
        if not given.strip():
            raise ChatRefused(field, "is empty")
        return given
    if not isinstance(given, list):
        raise ChatRefused(field, f"must be text or a list of messages, not {kind_of(given)}")
    messages = read_conversation(given, field)
    last = messages[-1]
    if last["role"] != "assistant":
        return messages
    where = f"{field}[{len(messages) - 1}]"
    if last.get("tool_calls"):
        raise ChatRefused(f"{where}.tool_calls", "no result follows; put the messages of the tools behind it")
    if not continues:
        raise ChatRefused(
            where,
            "the last message is the assistant's; remove it, or have the policy continue it with "
            "data.continue_final_message = true",
        )
    return messages


def conversation(prompt: Prompt, system: str | None) -> list[Message]:
    """Return a prompt as messages, with ``system`` in front unless it has a system (or developer) message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


class PromptEncoder:
    """Encodes the prompts of one data set. May be called from several threads at a time."""

    def __init__(self, tokenizer: Tokenizer, data: PromptsConfig, config: Config | None = None) -> None:
        self._tokenizer, self._data = tokenizer, data
        self._chat = config.chat if config is not None else ChatConfig()
        self._tools_are_code = config is not None and config.episode.kind == "tools"

    def __call__(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[list[int], str]:
        """Return the ids of a prompt, and its text as the model sees it. Raises ValueError or ConfigError."""
        if tools and self._tools_are_code:
            problem = "an episode with episode.tools shows the tools of its code alone; set"
            raise ChatRefused(self._data.tools_key, f'{problem} data.tools_key = ""')
        if self._data.template == "chat":
            text = self._render_checked(prompt, tools)
            return self._tokenizer.encode(text), text
        if not isinstance(prompt, str):
            raise ValueError('chat messages need template = "chat"')
        if tools:
            problem = 'tools are shown under data.template = "chat" alone; if they are not for the model, set'
            raise ChatRefused(self._data.tools_key, f'{problem} data.tools_key = ""')
        return self._tokenizer.encode_prompt(prompt), prompt

    def _render_checked(self, prompt: Prompt, tools: Sequence[Tool]) -> str:
        """Check that the template shows all of a prompt, and render it up to the policy's answer. Raises ChatRefused.

        If the assistant's message is the last one, the text ends with its content, for the policy to continue.
        """
        if self._tokenizer.template_text(with_tools=False) is None:
            # This call raises the ConfigError that names the model's folder.
            self._tokenizer.render_chat(conversation(prompt, None))
        system = self._data.system
        messages = conversation(prompt, system)
        own_count = 1 if isinstance(prompt, str) else len(prompt)
        field, tools_field = self._data.prompt_column, self._data.tools_key
        self._shown.require(messages, tools, field=field, tools_field=tools_field, system=len(messages) > own_count)
        if messages[-1]["role"] != "assistant":
            return self._template.text(messages, tools)
        # As under continue_final_message of transformers, the text ends with the last content. A made-up word marks
        # that place.
        *before, last = messages
        marked = last | {"content": last["content"] + CONTINUED}
        text, found, _ = self._template.text([*before, marked], tools, generate=False).rpartition(CONTINUED)
        if not found:
            raise ChatRefused(field, "the chat template does not show the last message, so it cannot be continued")
        return text

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._tokenizer.eos_ids)

    @cached_property
    def _shown(self) -> ShownCheck:
        return ShownCheck.of(self._template, self._chat)


# --- the template ---


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


# --- parts that are not shown ---


class ShownCheck:
    """Checks with one template whether the model reads all parts of a conversation, as the module describes.

    ``render`` returns the text of a conversation. ``writes_calls`` and ``shows_reasoning``: whether the text can have
    them at all. ``by_answer`` is for supervised conversations, where each answer is trained after the messages before
    it. A part then counts as shown if the model reads it before any answer. Some templates show the system message only
    before the last user message.
    """

    def __init__(self, render: Render, *, writes_calls: bool, shows_reasoning: bool, by_answer: bool = False) -> None:
        self._render, self._writes_calls, self._shows_reasoning = render, writes_calls, shows_reasoning
        self._by_answer = by_answer
        self._known: dict[Any, Missing | None] = {}
        """Results of ``_first_missing``, by the kind of conversation (``_Marked.kind``)."""

    @classmethod
    def of(cls, template: ChatTemplate, chat: ChatConfig, *, by_answer: bool = False) -> ShownCheck:
        """Make the check of a model's template. Calls in the content count if the run's parser reads them there."""
        return cls(
            lambda messages, tools: template.text(messages, tools, generate=messages[-1]["role"] != "assistant"),
            writes_calls=template.writes_calls or chat.tool_parser == "json",
            shows_reasoning=template.shows_reasoning,
            by_answer=by_answer,
        )

    def require(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, field: str, tools_field: str, system: bool = False
    ) -> None:
        """Raise ChatRefused for the first part that is not shown.

        ``field`` and ``tools_field`` are the columns of the messages and the tools, for the error. ``system``: whether
        the first message is data.system, and not the row's.
        """
        marked = _Marked(messages, tools)
        missing = self._known.get(marked.kind, UNKNOWN)
        if missing is UNKNOWN:
            missing = self._first_missing(marked)
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[marked.kind] = missing
        if missing is None:
            return
        index, path, problem = missing
        if index < 0:
            raise ChatRefused(f"{tools_field}{path}", problem)
        if system and index == 0:
            raise ChatRefused("data.system", problem)
        # With a system message in front, the row's own messages begin at index 1.
        raise ChatRefused(f"{field}[{index - system}]{path}", problem)

    def _first_missing(self, marked: _Marked) -> Missing | None:
        """Render marked messages, and return the first part whose mark the text lacks; None if all are shown.

        None also if the template refuses the marked messages.
        """
        for index, message in enumerate(marked.messages):
            if message.get("tool_calls") and not self._writes_calls:
                return index, ".tool_calls", CALLS_LEFT_OUT
        try:
            text = self._text(marked.messages, marked.tools)
        except ChatRefused:
            # If the template refuses the conversation itself too, its own render will raise the error.
            return None
        for mark, index, path in marked.marks:
            if mark in text or (path == ".reasoning_content" and self._shows_reasoning):
                continue
            if index < 0 and path.endswith(".name"):
                return index, path, TOOLS_LEFT_OUT
            field = "tools" if index < 0 else path.partition("[")[0].removeprefix(".")
            return index, path, LEFT_OUT.format(CHANGES[field])
        return None

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the rendered conversation; if ``by_answer``, after the rendered messages before each answer."""
        # An answer at index 0 has no messages before it.
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
        ends = [*(answers if self._by_answer else ()), len(messages)]
        return "\n".join(self._render(messages[:end], tools) for end in ends)


class _Marked:
    """A conversation in which a made-up word, its mark, replaces each text."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self.marks: list[tuple[str, int, str]] = []
        """Each mark with the index of its message, or -1 for the tools, and the path of its field."""
        self.messages = [self._message(message, index) for index, message in enumerate(messages)]
        self.tools = [self._tool(tool, f"[{number}].function") for number, tool in enumerate(tools)]
        self.kind = (
            tuple((message["role"], message["content"] == "") for message in self.messages),
            tuple(self.marks),
        )
        """Everything that the result of the check depends on: the roles, and the fields with a text."""

    def _make_mark(self, index: int, path: str) -> str:
        """Make and note a new mark for the field ``path`` of the message ``index``, or of the tools if it is -1."""
        mark = f"qkz{len(self.marks)}shown"
        self.marks.append((mark, index, path))
        return mark

    def _message(self, message: Message, index: int) -> Message:
        """Copy a message, with a mark in each field that has a text."""
        marked = dict(message)
        for key in ("content", "reasoning_content"):
            if message.get(key, "").strip():
                marked[key] = self._make_mark(index, f".{key}")
        if "name" in message and message["role"] != "tool":
            marked["name"] = self._make_mark(index, ".name")
        if "tool_calls" in message:
            marked["tool_calls"] = [
                call | {"function": self._called(call["function"], index, f".tool_calls[{number}].function")}
                for number, call in enumerate(message["tool_calls"])
            ]
        return marked

    def _called(self, function: dict[str, Any], index: int, path: str) -> dict[str, Any]:
        """Copy the function of a call, with marks for its name and for its arguments if it has any."""
        arguments, name = function["arguments"], self._make_mark(index, f"{path}.name")
        if not arguments:
            return {"name": name, "arguments": arguments}
        mark = self._make_mark(index, f"{path}.arguments")
        return {"name": name, "arguments": mark if isinstance(arguments, str) else {"word": mark}}

    def _tool(self, tool: Tool, path: str) -> Tool:
        """Copy a tool, with marks for its name, its description and its parameters."""
        function = dict(tool["function"])
        function["name"] = self._make_mark(-1, f"{path}.name")
        if function.get("description"):
            function["description"] = self._make_mark(-1, f"{path}.description")
        if function["parameters"].get("properties"):
            mark = self._make_mark(-1, f"{path}.parameters")
            function["parameters"] = {"type": "object", "properties": {mark: {"type": "string"}}, "required": []}
        return tool | {"function": function}

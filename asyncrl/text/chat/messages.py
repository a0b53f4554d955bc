"""Messages and tools of OpenAI's chat completions, brought into the one form that chat templates know. Pure.

Agents' requests, prompts of rows and supervised conversations all pass through here; ``row_messages.py`` checks rows
first. Invariant: the result has text alone, and the roles system, user, assistant and tool. Calls have an id and a
name, and results of tools answer calls that were made before. Fails with ChatRefused, which names the field, as
messages[3].content[0].type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.core.errors import ChatRefused

Message = dict[str, Any]
"""Message: role and content (text); name, reasoning_content, tool_call_id, and tool_calls of id, type and function."""
Tool = dict[str, Any]
"""A tool: type, and function of name, description and parameters (a JSON schema)."""

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system"}
"""Later names of roles that templates know by an older one."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that clients and datasets have for an assistant's reasoning; the result has the first."""
OF_A_FUNCTION = ("name", "description", "parameters")
NOT_SHOWN = ("strict",)
"""Fields of a function that are for the sampling of calls, not for the model's eyes."""
NO_PARAMETERS = {"type": "object", "properties": {}}


def normalise_messages(messages: Sequence[Any], *, field: str = "messages") -> list[Message]:
    """The messages in one form. Arguments of calls become objects where they are JSON objects: templates write them.

    ``field`` is the name of the messages in errors. Raises ChatRefused.
    """
    if not messages:
        raise ChatRefused(field, "holds no message")
    found: list[Message] = []
    called: set[str] = set()
    for number, given in enumerate(messages):
        where = f"{field}[{number}]"
        message = _message(given, where)
        for call in message.get("tool_calls", ()):
            called.add(call["id"])
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            raise ChatRefused(
                f"{where}.tool_call_id", f"no call of a message before has the id {message['tool_call_id']!r}"
            )
        found.append(message)
    return found


def normalise_tools(tools: Sequence[Any], *, field: str = "tools") -> list[Tool]:
    """The tools in one form, with their fields in the order in which models are trained on them.

    Further fields of a function, as ``return``, follow behind. ``field`` is the name of the tools in errors. Raises
    ChatRefused.
    """
    found: list[Tool] = []
    all_tools = field
    for number, tool in enumerate(tools):
        field = f"{all_tools}[{number}]"
        function = object_of(object_of(tool, field).get("function"), f"{field}.function")
        if tool.get("type", "function") != "function":
            raise ChatRefused(f"{field}.type", f"is {tool['type']!r}; only functions can be called")
        name = _text(function.get("name"), f"{field}.function.name")
        if not name:
            raise ChatRefused(f"{field}.function.name", "is empty")
        if any(each["function"]["name"] == name for each in found):
            raise ChatRefused(f"{field}.function.name", f"{name!r} is the name of a tool before it")
        written: dict[str, Any] = {"name": name}
        if function.get("description") is not None:
            written["description"] = _text(function["description"], f"{field}.function.description")
        parameters = function.get("parameters")
        written["parameters"] = (
            NO_PARAMETERS if parameters is None else object_of(parameters, f"{field}.function.parameters")
        )
        more = {key: value for key, value in function.items() if key not in (*OF_A_FUNCTION, *NOT_SHOWN)}
        written |= {key: value for key, value in more.items() if value is not None}
        found.append({"type": "function", "function": written})
    return found


def _message(given: Any, field: str) -> Message:
    given = object_of(given, field)
    role = _text(given.get("role"), f"{field}.role")
    role = SAME_ROLE.get(role, role)
    if role not in ROLES:
        raise ChatRefused(f"{field}.role", f"is {role!r}; there are {', '.join(ROLES)} and developer")
    for old in ("function_call", "audio"):
        if given.get(old) is not None:
            raise ChatRefused(f"{field}.{old}", "cannot be shown to the model; send content and tool_calls")
    message: Message = {"role": role, "content": _content(given, role, field)}
    if given.get("name") is not None:
        message["name"] = _text(given["name"], f"{field}.name")
    if role == "assistant":
        for key in REASONING:
            if given.get(key) is not None:
                message["reasoning_content"] = _text(given[key], f"{field}.{key}")
                break
        if calls := _calls(given.get("tool_calls"), f"{field}.tool_calls"):
            message["tool_calls"] = calls
    elif given.get("tool_calls"):
        raise ChatRefused(f"{field}.tool_calls", f"a message of the role {role} makes no calls")
    if role == "tool":
        message["tool_call_id"] = _text(given.get("tool_call_id"), f"{field}.tool_call_id")
    return message


def _content(given: Mapping[str, Any], role: str, field: str) -> str:
    """The text of a message; parts of text are joined by newlines, as vLLM's server does it."""
    content, field = given.get("content"), f"{field}.content"
    if content is None and role == "assistant":
        # Templates add it to text, or ask whether it is empty.
        return ""
    if isinstance(content, str):
        return _text(content, field)
    if not isinstance(content, list):
        raise ChatRefused(field, f"must be text or a list of text parts, not {kind_of(content)}")
    texts = []
    for number, part in enumerate(content):
        where = f"{field}[{number}]"
        kind = object_of(part, where).get("type")
        key = {"text": "text", "refusal": "refusal"}.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise ChatRefused(f"{where}.type", f"is {kind!r}; the policy reads text parts alone")
        texts.append(_text(part.get(key), f"{where}.{key}"))
    return "\n".join(texts)


def _calls(given: Any, field: str) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise ChatRefused(field, f"must be a list, not {kind_of(given)}")
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(given):
        where = f"{field}[{number}]"
        if object_of(call, where).get("type", "function") != "function":
            raise ChatRefused(f"{where}.type", f"is {call['type']!r}; only functions can be called")
        id = _text(call.get("id"), f"{where}.id")
        if any(each["id"] == id for each in calls):
            raise ChatRefused(f"{where}.id", f"{id!r} is the id of a call before it")
        function = object_of(call.get("function"), f"{where}.function")
        name = _text(function.get("name"), f"{where}.function.name")
        arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def read_arguments(given: Any, field: str = "arguments") -> dict[str, Any] | str:
    """Arguments of a call as templates want them: an object if they are one that messages of the run can hold, else
    the text. Raises ChatRefused.
    """
    if given is None or given == "":
        return {}
    text = json.dumps(given) if isinstance(given, dict) else _text(given, field)
    value = given if isinstance(given, dict) else read_json(text)
    return value if isinstance(value, dict) and _can_be_sent(value) else text


def _can_be_sent(value: dict[str, Any]) -> bool:
    """Whether MessagePack holds it: no integer beyond 64 bits, no half of a surrogate pair."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True


def read_json(text: str) -> Any:
    """The value of a JSON text, or None if it is invalid.

    NaN, and numbers beyond what a float holds such as 1e999, are invalid: Python would read both and write no JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is more than a float holds")
    return value


def object_of(value: Any, field: str) -> dict[str, Any]:
    """The value, which is an object. Raises ChatRefused."""
    if not isinstance(value, dict):
        raise ChatRefused(field, f"must be an object, not {kind_of(value)}")
    return value


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ChatRefused(field, f"must be text, not {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ChatRefused(field, "holds half of a surrogate pair, which is not text") from None
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, for errors."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")

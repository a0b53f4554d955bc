"""Checks messages and tools of OpenAI's chat completions, and brings them into the form of chat templates. Pure.

Agents' requests, prompts of rows and supervised conversations all pass through here. Rows are checked more strictly
than requests: an unusable field is refused by name, because otherwise it would be lost unseen. Rows may leave out ids
of calls, and their null fields are ignored.

Invariant: contents of the result are text, and its roles are system, user, assistant and tool. Calls have an id and a
name, and results of tools answer calls that were made before. Fails with ChatRefused, which names the field, as
messages[3].content[0].type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.core.errors import ChatRefused

Message = dict[str, Any]
"""Message: role and content (text); name, reasoning_content, tool_call_id, and tool_calls of id, type and function."""
Tool = dict[str, Any]
"""A tool: type, and function of name, description and parameters (a JSON schema)."""

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system"}
"""Newer names of roles, with the older names that templates know."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Field names of an assistant's reasoning in clients and datasets; the result has the first."""
OF_A_FUNCTION = ("name", "description", "parameters")
"""Fields of a tool's function, in the order in which templates get them; its further fields follow."""
NOT_SHOWN = ("strict",)
"""Fields of a function that only control how calls are sampled; the model does not see them."""
NO_PARAMETERS = {"type": "object", "properties": {}}
OF_ANY_ROLE = ("role", "content", "name")
OF_ROLE = {"assistant": (*REASONING, "tool_calls"), "tool": ("tool_call_id",)}
"""Further fields of a message, by role."""
OF_A_CALL = ("id", "type", "index", "function")
CALLED = ("name", "arguments")
"""Fields of the ``function`` of a call."""
OF_A_PART = ("type", "text")
OF_A_TOOL = ("type", "function", "strict")
SHAREGPT = ("from", "value")
"""Fields of a message in the format of ShareGPT, which is refused."""


def normalise_messages(messages: Sequence[Any], *, field: str = "messages") -> list[Message]:
    """Check messages and bring them into the one form of this module. Raises ChatRefused.

    Arguments of calls become objects if they are JSON objects, because templates write them as JSON. ``field`` is the
    name of the messages in errors.
    """
    if not messages:
        raise ChatRefused(field, "holds no message")
    normalised: list[Message] = []
    call_ids: set[str] = set()
    for number, given in enumerate(messages):
        where = f"{field}[{number}]"
        message = _message(given, where)
        for call in message.get("tool_calls", ()):
            call_ids.add(call["id"])
        if message["role"] == "tool" and message["tool_call_id"] not in call_ids:
            raise ChatRefused(
                f"{where}.tool_call_id", f"no call of a message before has the id {message['tool_call_id']!r}"
            )
        normalised.append(message)
    return normalised


def normalise_tools(tools: Sequence[Any], *, field: str = "tools") -> list[Tool]:
    """Check tools and bring them into one form, with their fields in the order in which models are trained on them.

    Further fields of a function, such as ``return``, come last. ``field`` is the name of the tools in errors. Raises
    ChatRefused.
    """
    normalised: list[Tool] = []
    all_tools = field
    for number, tool in enumerate(tools):
        field = f"{all_tools}[{number}]"
        function = object_of(object_of(tool, field).get("function"), f"{field}.function")
        if tool.get("type", "function") != "function":
            raise ChatRefused(f"{field}.type", f"is {tool['type']!r}; only functions can be called")
        name = _text(function.get("name"), f"{field}.function.name")
        if not name:
            raise ChatRefused(f"{field}.function.name", "is empty")
        if any(each["function"]["name"] == name for each in normalised):
            raise ChatRefused(f"{field}.function.name", f"{name!r} is the name of a tool before it")
        ordered: dict[str, Any] = {"name": name}
        if function.get("description") is not None:
            ordered["description"] = _text(function["description"], f"{field}.function.description")
        parameters = function.get("parameters")
        ordered["parameters"] = (
            NO_PARAMETERS if parameters is None else object_of(parameters, f"{field}.function.parameters")
        )
        further = {key: value for key, value in function.items() if key not in (*OF_A_FUNCTION, *NOT_SHOWN)}
        ordered |= {key: value for key, value in further.items() if value is not None}
        normalised.append({"type": "function", "function": ordered})
    return normalised


def _message(given: Any, field: str) -> Message:
    """Check one message and bring it into the form that templates know. Raises ChatRefused."""
    given = object_of(given, field)
    role = _text(given.get("role"), f"{field}.role")
    role = SAME_ROLE.get(role, role)
    if role not in ROLES:
        raise ChatRefused(f"{field}.role", f"is {role!r}; there are {', '.join(ROLES)} and developer")
    for unsupported in ("function_call", "audio"):
        if given.get(unsupported) is not None:
            raise ChatRefused(f"{field}.{unsupported}", "cannot be shown to the model; send content and tool_calls")
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
    """Return the text of a message. Parts are joined by newlines, as vLLM's server does. Raises ChatRefused."""
    content, field = given.get("content"), f"{field}.content"
    if content is None and role == "assistant":
        # Not None: templates concatenate the content, or test whether it is empty.
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
    """Check the calls of tools in a message, and return them with id, type and function. Raises ChatRefused."""
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
    """Return the arguments of a call as templates want them. Raises ChatRefused.

    That is an object, if they are a JSON object that a message of the run can hold; else their text.
    """
    if given is None or given == "":
        return {}
    text = json.dumps(given) if isinstance(given, dict) else _text(given, field)
    value = given if isinstance(given, dict) else read_json(text)
    return value if isinstance(value, dict) and _can_be_sent(value) else text


def _can_be_sent(value: dict[str, Any]) -> bool:
    """Whether MessagePack can hold a value: no integer beyond 64 bits, no half of a surrogate pair."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True


def read_json(text: str) -> Any:
    """Decode a JSON text; None if it is invalid.

    NaN, and numbers that a float cannot hold, such as 1e999, are invalid: Python would read both, and write text that
    is not JSON.
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
    """Return the value if it is an object. Raises ChatRefused."""
    if not isinstance(value, dict):
        raise ChatRefused(field, f"must be an object, not {kind_of(value)}")
    return value


def _text(value: Any, field: str) -> str:
    """Return the value if it is text that UTF-8 can hold. Raises ChatRefused."""
    if not isinstance(value, str):
        raise ChatRefused(field, f"must be text, not {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ChatRefused(field, "holds half of a surrogate pair, which is not text") from None
    return value


def kind_of(value: Any) -> str:
    """Name the type of a JSON value, for errors."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def read_conversation(given: Any, field: str, *, also: Collection[str] = ()) -> list[Message]:
    """Check the messages of a row more strictly than those of a request, and normalise them. Raises ChatRefused.

    Calls without an id get one, and a tool's message without ``tool_call_id`` gets that of the call it answers.
    ``field`` is the column's name in errors. ``also`` are further fields of a message that the caller reads itself.
    """
    if not isinstance(given, list):
        raise ChatRefused(field, f"must be a list of messages, not {kind_of(given)}")
    messages: list[Any] = []
    unanswered: list[tuple[str, str]] = []
    for number, message in enumerate(given):
        where = f"{field}[{number}]"
        message = _without_empty(object_of(message, where))
        role = message.get("role")
        known = (*OF_ANY_ROLE, *also, *OF_ROLE.get(role if isinstance(role, str) else "", ()))
        _require_known(message, known, where)
        _check_content(message, where)
        if role == "assistant":
            message = _merge_reasoning(message, where)
            if "tool_calls" in message:
                calls = _row_calls(message["tool_calls"], f"{where}.tool_calls", f"call_{number}_")
                message = message | {"tool_calls": calls}
                unanswered += [(call["id"], call["function"].get("name")) for call in calls]
        if role == "tool":
            message = message | {"tool_call_id": _take_answered_call(message, unanswered, where)}
        messages.append({key: value for key, value in message.items() if key not in also})
    return normalise_messages(messages, field=field)


def read_tools(given: Any, field: str) -> list[Tool]:
    """Read the tools of a row: a list of OpenAI's schemas or of bare functions, or the JSON text of such a list.

    Returns an empty list for null or an empty text. Raises ChatRefused.
    """
    if given is None or given == "":
        return []
    listed = read_json(given) if isinstance(given, str) else given
    if not isinstance(listed, list):
        raise ChatRefused(field, "must be a list of tools as OpenAI's API has them, or the JSON text of such a list")
    tools = []
    for number, tool in enumerate(listed):
        where = f"{field}[{number}]"
        tool = _without_empty(object_of(tool, where))
        if "function" not in tool and "name" in tool:
            tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
        _require_known(tool, OF_A_TOOL, where)
        tools.append(tool)
    return normalise_tools(tools, field=field)


def without_nulls(value: Any) -> Any:
    """Remove all fields that are null from a value, also inside it.

    In a table with typed columns, a field that was left out is null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _without_empty(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not empty, and ``content`` even if it is."""
    return {key: value for key, value in given.items() if key == "content" or value not in (None, "", [], {})}


def _require_known(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ChatRefused for a field that is not in ``known``."""
    for key in given:
        if key in known:
            continue
        of_a_message = "role" in known
        if of_a_message and key in SHAREGPT:
            raise ChatRefused(f"{where}.{key}", "is not a field of a message; write role and content")
        if of_a_message and any(key in fields for fields in OF_ROLE.values()):
            raise ChatRefused(f"{where}.{key}", f"a message of the role {given.get('role')!r} has no such field")
        raise ChatRefused(f"{where}.{key}", f"cannot be shown to the model; known are {', '.join(known)}")


def _check_content(message: Mapping[str, Any], where: str) -> None:
    """Raise ChatRefused if a message has no content where it needs one, or text parts with unknown fields."""
    content = message.get("content")
    if content in (None, []) and not any(key in message for key in ("tool_calls", *REASONING)):
        problem = "has no part" if content == [] else "is null or missing"
        raise ChatRefused(f"{where}.content", f"{problem}; give it text or a list of text parts")
    if not isinstance(content, list):
        return
    for number, part in enumerate(content):
        part = object_of(part, f"{where}.content[{number}]")
        if part.get("type") == "text":
            _require_known(_without_empty(part), OF_A_PART, f"{where}.content[{number}]")


def _merge_reasoning(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Keep the reasoning under one name only. Raises ChatRefused if two names hold different texts."""
    keys = [key for key in REASONING if key in message]
    for key in keys[1:]:
        if message[key] != message[keys[0]]:
            raise ChatRefused(f"{where}.{key}", f"differs from {keys[0]}; give the reasoning once")
    return {key: value for key, value in message.items() if key not in keys[1:]}


def _row_calls(given: Any, field: str, prefix: str) -> list[dict[str, Any]]:
    """Check the calls in a row's message, and give an id to each call without one: ``prefix`` and its number.

    ``given`` is a list or its JSON text. Raises ChatRefused.
    """
    listed = read_json(given) if isinstance(given, str) else given
    if not isinstance(listed, list):
        raise ChatRefused(field, "must be a list of calls, or the JSON text of one")
    calls = []
    for number, call in enumerate(listed):
        where = f"{field}[{number}]"
        call = _without_empty(object_of(call, where))
        if "function" not in call:
            # Some datasets hold the function's name and arguments alone.
            named = {key: call.pop(key) for key in CALLED if key in call}
            call["function"] = named
        _require_known(call, OF_A_CALL, where)
        function = object_of(call["function"], f"{where}.function")
        _require_known(_without_empty(function), CALLED, f"{where}.function")
        call = {"id": f"{prefix}{number}", "type": "function"} | call
        calls.append({key: value for key, value in call.items() if key != "index"})
    return calls


def _take_answered_call(message: Mapping[str, Any], unanswered: list[tuple[str, str]], where: str) -> Any:
    """Find the call that a tool's message answers. Removes it from ``unanswered`` and returns its id.

    ``unanswered`` has (id, name) of each call. A message without an id answers the first call, or the first call of its
    name if it has a name. Raises ChatRefused without such a call. An unknown id is returned as it is:
    ``normalise_messages`` checks ids.
    """
    id, name = message.get("tool_call_id"), message.get("name")
    for index, (open_id, open_name) in enumerate(unanswered):
        if open_id == id or (id is None and name in (None, open_name)):
            del unanswered[index]
            return open_id
    if id is None:
        of_name = f" of {name!r}" if isinstance(name, str) else ""
        raise ChatRefused(where, f"answers no call: no call{of_name} before it is without an answer")
    return id

"""Conversations and tools of a dataset's row, in the form that chat templates know. Pure.

Rows are checked more strictly than agents' requests: an unusable field is refused by name, because its loss would go
unseen. Rows may lack what datasets leave out: ids of calls, and null fields. The conversion is that of ``messages.py``.

Fails with ChatRefused, which names the field, such as prompt[3].tool_calls[0].name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import (
    REASONING,
    Message,
    Tool,
    kind_of,
    normalise_messages,
    normalise_tools,
    object_of,
    read_json,
)

OF_ANY_ROLE = ("role", "content", "name")
OF_ROLE = {"assistant": (*REASONING, "tool_calls"), "tool": ("tool_call_id",)}
"""Further fields of a message, by role."""
OF_A_CALL = ("id", "type", "index", "function")
CALLED = ("name", "arguments")
OF_A_PART = ("type", "text")
OF_A_TOOL = ("type", "function", "strict")
SHAREGPT = ("from", "value")


def read_conversation(given: Any, field: str, *, also: Collection[str] = ()) -> list[Message]:
    """The messages of a row. ``field`` is their column in errors; ``also`` are fields that the caller reads itself.

    Raises ChatRefused.
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
            message = _one_reasoning(message, where)
            if "tool_calls" in message:
                calls = _calls(message["tool_calls"], f"{where}.tool_calls", f"call_{number}_")
                message = message | {"tool_calls": calls}
                unanswered += [(call["id"], call["function"].get("name")) for call in calls]
        if role == "tool":
            message = message | {"tool_call_id": _answered(message, unanswered, where)}
        messages.append({key: value for key, value in message.items() if key not in also})
    return normalise_messages(messages, field=field)


def read_tools(given: Any, field: str) -> list[Tool]:
    """The tools of a row: a list of OpenAI's schemas or of bare functions, or the JSON text of one; none for null.

    Raises ChatRefused.
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
    """A value of a table with typed columns, in which a field that was left out is null, without those fields."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _without_empty(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something: empty text in ``content`` does."""
    return {key: value for key, value in given.items() if key == "content" or value not in (None, "", [], {})}


def _require_known(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in given:
        if key in known:
            continue
        if key in SHAREGPT:
            raise ChatRefused(f"{where}.{key}", "is not a field of a message; write role and content")
        if any(key in fields for fields in OF_ROLE.values()):
            raise ChatRefused(f"{where}.{key}", f"a message of the role {given.get('role')!r} has no such field")
        raise ChatRefused(f"{where}.{key}", f"cannot be shown to the model; known are {', '.join(known)}")


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if content in (None, []) and not any(key in message for key in ("tool_calls", *REASONING)):
        said = "has no part" if content == [] else "is null or missing"
        raise ChatRefused(f"{where}.content", f"{said}; give it text or a list of text parts")
    if not isinstance(content, list):
        return
    for number, part in enumerate(content):
        part = object_of(part, f"{where}.content[{number}]")
        if part.get("type") == "text":
            _require_known(_without_empty(part), OF_A_PART, f"{where}.content[{number}]")


def _one_reasoning(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its reasoning under one name. Raises ChatRefused where two names hold two texts."""
    keys = [key for key in REASONING if key in message]
    for key in keys[1:]:
        if message[key] != message[keys[0]]:
            raise ChatRefused(f"{where}.{key}", f"differs from {keys[0]}; give the reasoning once")
    return {key: value for key, value in message.items() if key not in keys[1:]}


def _calls(given: Any, field: str, prefix: str) -> list[dict[str, Any]]:
    """The calls, each with an id; ``prefix`` begins the ids of those that have none."""
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


def _answered(message: Mapping[str, Any], unanswered: list[tuple[str, str]], where: str) -> Any:
    """The id of the call that a tool's message answers: its own, or that of the first open call (of its name)."""
    id, name = message.get("tool_call_id"), message.get("name")
    for place, (open_id, open_name) in enumerate(unanswered):
        if open_id == id or (id is None and name in (None, open_name)):
            return unanswered.pop(place)[0]
    if id is None:
        of_name = f" of {name!r}" if isinstance(name, str) else ""
        raise ChatRefused(where, f"answers no call: no call{of_name} before it is without an answer")
    return id

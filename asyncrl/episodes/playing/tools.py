"""An episode with tools: the policy is asked until it calls none.

A tool is a typed function, plain or asynchronous, or a public method of an object of the user's class. Each episode
makes an object of its own, with ``task`` if the class takes it. Annotations give the JSON schema and the validation of
arguments, the docstring gives descriptions. ``result_text`` turns a result into the text that the policy reads. If a
tool raises, the policy reads the error; the error is also counted and reported to the user.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from asyncrl.core.errors import EpisodeOver
from asyncrl.episodes.playing.client import Client
from asyncrl.episodes.playing.function import Player, call
from asyncrl.episodes.playing.task import Task
from asyncrl.messages.episodes import ToolCall

_ARGUMENT = re.compile(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$", re.MULTILINE)
"""A line of a docstring that describes an argument: NAME: TEXT, or NAME (TYPE): TEXT, indented."""
Note = Callable[[str, Exception | None, bool], None]
"""Receives calls of tools: the tool's name, its error, and whether the policy is at fault."""


class WrongArguments(ValueError):
    """The policy has called a tool with arguments that it does not take."""


class Tool:
    """A tool as the policy sees it, and its call. Raises pydantic's errors for a function that has no schema."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function

        def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        # It validates the arguments and does not call: errors of the tool itself are not the policy's.
        arguments_of: Any = functools.update_wrapper(given, function)
        self._adapter: TypeAdapter[Any] = TypeAdapter(arguments_of)
        text, parameters = inspect.getdoc(function) or "", self._adapter.json_schema()
        for parameter, about in _ARGUMENT.findall(text):
            if parameter in parameters["properties"]:
                parameters["properties"][parameter]["description"] = about
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": text.split("\n\n")[0], "parameters": parameters},
        }

    async def call(self, arguments: str) -> str:
        """The call's result as text. Raises WrongArguments, and the tool's own errors."""
        try:
            args, kwargs = self._adapter.validate_json(arguments)
        except ValidationError as error:
            raise WrongArguments(str(error)) from error
        value = await call(self._function, *args, **kwargs)
        return result_text(value)


def result_text(value: Any) -> str:
    """The text of a tool's result: text as it stands, everything else as JSON whose letters are not escaped.

    Dataclasses, pydantic models, sets, tuples, enums, dates and arrays become JSON at any depth; None is ``null``.
    Bytes are text in UTF-8; other bytes are escaped, or base64 inside of a dataclass or a model. An object of any other
    class is its ``str()``. Raises ValueError for a value that contains itself.
    """
    if isinstance(value, str):
        return value
    try:
        plain = _to_plain(value, "utf8")
    except UnicodeDecodeError:
        plain = _to_plain(_escape_bytes(value), "base64")
    # An object that JSON has no form for is its text, without the quotes of JSON.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _to_plain(value: Any, bytes_mode: Literal["utf8", "base64"]) -> Any:
    return to_jsonable_python(value, fallback=_plain_value, bytes_mode=bytes_mode, inf_nan_mode="constants")


def _escape_bytes(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {key: _escape_bytes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_bytes(each) for each in value]
    return value


def _plain_value(value: Any) -> Any:
    """A value of a class that pydantic does not know. Arrays of numpy, torch and pandas have ``tolist``."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def methods(made: object) -> list[tuple[str, Callable[..., Any]]]:
    """The tools of an object or of a class: its public methods but ``close``."""
    # Attributes of the object alone are its state, callable or not, and a grader among them is not for the policy.
    found = inspect.getmembers(made if inspect.isclass(made) else type(made), callable)
    names = [name for name, _ in found if not name.startswith("_") and name != "close"]
    return [(name, each) for name in names if callable(each := getattr(made, name))]


def tools_player(functions: list[Tool], classes: list[Callable[[Task], Any]], note: Note) -> Player:
    """A player with these tools. The policy's answers are scored by reward.function."""

    async def play(task: Task, client: Client) -> None:
        objects: list[Any] = []
        try:
            # One by one: if a later one cannot be made, the earlier ones are closed.
            for make in classes:
                objects.append(await call(make, task))  # noqa: PERF401
            tools = {tool.name: tool for tool in functions}
            tools |= {name: Tool(name, method) for made in objects for name, method in methods(made)}
            schemas = [tool.schema for tool in tools.values()]
            messages = list(task.messages)
            while (reply := await client.chat(messages, tools=schemas)).tool_calls:
                messages.append(reply.message)
                for called in reply.tool_calls:
                    said = await _result(tools, called, note)
                    # The policy may have a tool write half of a surrogate pair, which no message can hold.
                    said = said.encode(errors="backslashreplace").decode()
                    messages.append({"role": "tool", "tool_call_id": called.id, "content": said})
        finally:
            # If one fails to close, the others are closed all the same.
            async with AsyncExitStack() as closing:
                for made in reversed(objects):
                    if callable(close := getattr(made, "close", None)):
                        closing.push_async_callback(call, close)

    return play


async def _result(tools: dict[str, Tool], called: ToolCall, note: Note) -> str:
    try:
        if called.name not in tools:
            raise LookupError(f"there is no tool {called.name!r}; there are {', '.join(tools)}")
        said = await tools[called.name].call(called.arguments)
    except EpisodeOver:
        # The end of the episode is not an error of the tool, and the policy is not asked again.
        raise
    except Exception as error:
        mistaken = isinstance(error, WrongArguments) or called.name not in tools
        note(called.name, error, mistaken)
        return f"error: {error}" if mistaken else f"error: {type(error).__name__}: {error}"
    note(called.name, None, False)
    return said

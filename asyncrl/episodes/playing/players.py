"""The players of episodes: the user's function, environment or tools, loaded from the configuration and called.

A function is ``async def episode(task, client) -> reward``. A plain function runs in a thread with a blocking client
(BlockingClient). With tools the policy is asked until it calls none. A tool is a typed function, plain or asynchronous,
or a public method of an object of the user's class. Each episode makes an object of its own, with ``task`` if the class
takes it. Annotations give the JSON schema and the validation of arguments, the docstring gives descriptions. If a tool
raises, the policy reads the error; the error is also counted and reported to the user.

Invariant: ``resolve`` raises NotCallable for problems that can be found before the first episode. It neither makes nor
calls users' objects. Plain code never blocks the event loop (``call``). A call ends only after its code has ended, even
if the episode is stopped meanwhile, so no call of an episode runs after its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from asyncrl.core.errors import EpisodeOver
from asyncrl.episodes.playing.client import Client, Task
from asyncrl.messages.episodes import ToolCall
from asyncrl.workers.user_code import Keys, NotCallable, accepted, describe, load

ADAPTERS = "asyncrl.episodes.adapters."
OPTIONS = "episode.options"
Player = Callable[[Task, Client], Awaitable[Any]]
"""Plays a task; returns the reward."""
GIVEN = ("task", "client")
"""Arguments that a user's function receives if its signature names them."""
MOST_THREADS = 1024
"""Most calls of plain code that run at a time in a worker; further ones wait."""
_threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="episode")
_ARGUMENT = re.compile(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$", re.MULTILINE)
"""A line of a docstring that describes an argument: NAME: TEXT, or NAME (TYPE): TEXT, indented."""
Note = Callable[[str, Exception | None, bool], None]
"""Called after each tool call with the tool's name, its error or None, and whether the policy is at fault."""


def resolve(kind: str, code: list[str], options: dict[str, Any], note: Note) -> Player:
    """Load the user's ``code`` of this ``kind`` (function, env or tools) and return a player that calls it.

    ``code`` has names MODULE:NAME. ``note`` is called after each tool call. Raises NotCallable.
    """
    if kind == "function":
        (spec,) = code
        function = load(spec, "episode.function")
        return function_player(
            function, options, accepted(spec, function, GIVEN, options, Keys("episode.function", OPTIONS))
        )
    if kind == "env":
        (spec,) = code
        make = _load_class(spec, "episode.env")
        accepted(spec, make, (), options, Keys("episode.env", OPTIONS))
        missing = [
            name for name in ("reset", "step") if inspect.isclass(make) and not callable(getattr(make, name, None))
        ]
        if missing:
            raise NotCallable([f"episode.env: {spec} has no {' and no '.join(f'{name}()' for name in missing)}"])
        return env_player(make, options)
    assert kind == "tools", kind
    return _load_tools(code, options, note)


def _load_class(spec: str, key: str) -> Callable[..., Any]:
    """Load a class. If an adapter's library is missing, the error says what to install."""
    try:
        return load(spec, key, "MODULE:CLASS")
    except NotCallable as error:
        name = spec.removeprefix(ADAPTERS).partition(":")[0]
        if spec.startswith(ADAPTERS) and isinstance(error.__cause__, ImportError):
            raise NotCallable(
                [f"{problem}; pip install 'asyncrl[{name.replace('_', '-')}]'" for problem in error.problems]
            ) from error
        raise


def _load_tools(code: list[str], options: dict[str, Any], note: Note) -> Player:
    """Load functions and classes of tools and return their player; ``options`` are arguments of the classes.

    Raises NotCallable: for the first name that cannot be loaded, or else with all problems.
    """
    functions: list[Tool] = []
    classes: list[Callable[[Task], Any]] = []
    names: list[str] = []
    keys = Keys("episode.tools", OPTIONS)
    loaded = [(spec, load(spec, keys.code, "MODULE:FUNCTION or MODULE:CLASS")) for spec in code]
    problems = []
    if options and not any(inspect.isclass(each) for _, each in loaded):
        problems.append(f"{OPTIONS}: are arguments of classes, and episode.tools names no class")
    for spec, each in loaded:
        try:
            if inspect.isclass(each):
                classes.append(_maker(each, options, accepted(spec, each, ("task",), options, keys)))
                found = [Tool(name, method) for name, method in methods(each)]
                names += [tool.name for tool in found]
                if not found:
                    problems.append(f"{keys.code}: {spec} has no public method, so it holds no tool")
            else:
                functions.append(Tool(each.__name__, each))
                names.append(each.__name__)
        except NotCallable as error:
            problems += error.problems
        except Exception as error:
            # Pydantic cannot make a schema of a type that it does not know.
            problems.append(f"{keys.code}: {spec} cannot be described to the policy: {describe(error)}")
    problems += [
        f"{keys.code}: there are several tools {name!r}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    if problems:
        raise NotCallable(problems)
    return tools_player(functions, classes, note)


def _maker(make: Callable[..., Any], options: dict[str, Any], names: list[str]) -> Callable[[Task], Any]:
    """Return a function that makes an object of the user's class for a task, with the arguments in ``names``."""
    return lambda task: make(**{name: task if name == "task" else options[name] for name in names})


def env_player(make: Callable[..., Any], options: dict[str, Any]) -> Player:
    """Return a player of the user's environment, which ``make`` makes for each episode. Its methods may be async.

    ``reset(task)`` returns the first messages, or a text, which becomes one message of the user. ``step(message)`` gets
    the policy's message (role, content, tool_calls) and returns (messages or text, reward, done[, info]): the
    environment's answer, the reward of the turn or None, and whether the episode has ended. The reward of an episode is
    the sum of its turns' rewards. If there is a method ``close``, it is called however the episode ends.
    """

    async def play(task: Task, client: Client) -> None:
        env = await call(make, **options)
        try:
            messages = _messages(await call(env.reset, task), "reset")
            done = False
            while not done:
                reply = await client.chat(messages, tools=task.tools)
                more, reward, done = _step(await call(env.step, reply.message))
                if reward is not None:
                    client.reward(reward)
                messages += [reply.message, *_messages(more, "step")]
        finally:
            if callable(close := getattr(env, "close", None)):
                await call(close)

    return play


def _step(value: Any) -> tuple[Any, Any, bool]:
    """Check what the user's ``step`` has returned, and split it into (answer, reward, done). Raises TypeError."""
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(
            f"step() returned {reprlib.repr(value)}; (messages or text, reward or None, done[, info]) is expected"
        )
    return value[0], value[1], bool(value[2])


def _messages(value: Any, method: str) -> list[Mapping[str, Any]]:
    """Turn what the user's ``method`` (reset or step) has returned into messages; text becomes one of the user.

    Raises TypeError.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    # [None] fails the check below, so that a value of any other type is refused.
    messages: list[Any] = [None]
    if isinstance(value, Mapping):
        messages = [value]
    elif isinstance(value, list | tuple):
        messages = list(value)
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise TypeError(
            f"{method}() said {reprlib.repr(value)}; text, a message with a role, or a list of such is expected"
        )
    return messages


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and return its value: asynchronous code runs on the event loop, plain code in a thread.

    If plain code returns an awaitable, the event loop awaits it. A cancelled call still waits for the end of its
    thread, which cannot be cancelled.
    """
    if is_async(function):
        return await function(*args, **kwargs)
    # In a copy of the context, the thread's output belongs to this episode (``current`` of episode_worker.py).
    context, loop = contextvars.copy_context(), asyncio.get_running_loop()
    running = loop.run_in_executor(_threads, lambda: context.run(function, *args, **kwargs))
    try:
        value = await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            # Read the exception, or asyncio would log it.
            running.exception()
        raise
    return await value if inspect.isawaitable(value) else value


def function_player(function: Callable[..., Any], options: dict[str, Any], names: list[str]) -> Player:
    """Return a player that calls ``function`` with the arguments in ``names``: of ``options``, task and client."""
    is_plain = not is_async(function)

    async def play(task: Task, client: Client) -> Any:
        given = {**options, "task": task, "client": client.blocking() if is_plain else client}
        return await call(function, **{name: given[name] for name in names})

    return play


class WrongArguments(ValueError):
    """The policy has called a tool with arguments that it does not take."""


class Tool:
    """A function that the policy can call, with the JSON schema of its arguments.

    Raises pydantic's errors for a function that has no schema.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function

        def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        # The adapter validates the arguments and does not call the tool, whose own errors are not the policy's fault.
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
        """Check ``arguments``, the JSON text of an object, call the function, and return its value as text.

        Raises WrongArguments, and the function's own errors.
        """
        try:
            args, kwargs = self._adapter.validate_json(arguments)
        except ValidationError as error:
            raise WrongArguments(str(error)) from error
        value = await call(self._function, *args, **kwargs)
        return result_text(value)


def result_text(value: Any) -> str:
    """Turn a tool's result into text: a string stays as it is, everything else becomes JSON without escaped letters.

    Dataclasses, pydantic models, sets, tuples, enums, dates and arrays become JSON at any depth; None is ``null``.
    Bytes are text in UTF-8. If some bytes are not UTF-8, they are escaped in dicts, lists and tuples. All bytes
    elsewhere, as in a dataclass or a set, then become base64. An object of any other class is its ``str()``. Raises
    ValueError for a value that contains itself.
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
    """Convert a value to the types of JSON. "utf8" raises UnicodeDecodeError for bytes that are not UTF-8."""
    return to_jsonable_python(value, fallback=_plain_value, bytes_mode=bytes_mode, inf_nan_mode="constants")


def _escape_bytes(value: Any) -> Any:
    """Decode bytes in dicts, lists and tuples, at any depth; escapes replace bytes that are not UTF-8."""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {key: _escape_bytes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_bytes(each) for each in value]
    return value


def _plain_value(value: Any) -> Any:
    """Convert a value of a class that pydantic does not know. Arrays of numpy, torch and pandas have ``tolist``."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def methods(made: object) -> list[tuple[str, Callable[..., Any]]]:
    """Return the tools of an object or of a class as (name, method): its public methods except ``close``."""
    # Only names of the class: callable attributes of the object alone, such as a grader, are its state.
    members = inspect.getmembers(made if inspect.isclass(made) else type(made), callable)
    names = [name for name, _ in members if not name.startswith("_") and name != "close"]
    return [(name, each) for name in names if callable(each := getattr(made, name))]


def tools_player(functions: list[Tool], classes: list[Callable[[Task], Any]], note: Note) -> Player:
    """Return a player that asks the policy and runs the tools that it calls, until an answer calls none.

    Each episode makes its own objects of ``classes`` and closes them. reward.function scores the conversation.
    """

    async def play(task: Task, client: Client) -> None:
        """Make the objects, ask and run tools in turn, and close the objects."""
        objects: list[Any] = []
        try:
            # Appended one by one: if an object cannot be made, the earlier objects are closed.
            for make in classes:
                objects.append(await call(make, task))  # noqa: PERF401
            tools = {tool.name: tool for tool in functions}
            tools |= {name: Tool(name, method) for made in objects for name, method in methods(made)}
            schemas = [tool.schema for tool in tools.values()]
            messages = list(task.messages)
            while (reply := await client.chat(messages, tools=schemas)).tool_calls:
                messages.append(reply.message)
                for called in reply.tool_calls:
                    result = await _run_tool(tools, called, note)
                    # The policy may have a tool write half of a surrogate pair, which no message can hold.
                    result = result.encode(errors="backslashreplace").decode()
                    messages.append({"role": "tool", "tool_call_id": called.id, "content": result})
        finally:
            # The stack closes all objects, even if one of them raises.
            async with AsyncExitStack() as closing:
                for made in reversed(objects):
                    if callable(close := getattr(made, "close", None)):
                        closing.push_async_callback(call, close)

    return play


async def _run_tool(tools: dict[str, Tool], called: ToolCall, note: Note) -> str:
    """Run one tool call and report it to ``note``; returns its result, or its error, as text for the policy."""
    try:
        if called.name not in tools:
            raise LookupError(f"there is no tool {called.name!r}; there are {', '.join(tools)}")
        result = await tools[called.name].call(called.arguments)
    except EpisodeOver:
        # The end of the episode is not an error of the tool, and the policy is not asked again.
        raise
    except Exception as error:
        mistaken = isinstance(error, WrongArguments) or called.name not in tools
        note(called.name, error, mistaken)
        return f"error: {error}" if mistaken else f"error: {type(error).__name__}: {error}"
    note(called.name, None, False)
    return result

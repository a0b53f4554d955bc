"""Players from the configuration: the user's function, environment or tools, loaded and checked against their options.

Invariant: ``resolve`` raises NotCallable with a line for each problem that can be found before the first episode. It
neither makes nor calls users' objects.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.episodes.playing.client import Client
from asyncrl.episodes.playing.function import GIVEN, Player, call, function_player
from asyncrl.episodes.playing.task import Task
from asyncrl.episodes.playing.tools import Note, Tool, methods, tools_player
from asyncrl.workers.user_code import Keys, NotCallable, accepted, describe, load

ADAPTERS = "asyncrl.episodes.adapters."
OPTIONS = "episode.options"


def resolve(kind: str, code: list[str], options: dict[str, Any], note: Note) -> Player:
    """The player of an EpisodeConfig of this kind, whose function, env or tools are ``code``. Raises NotCallable."""
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
    return _tools(code, options, note)


def _load_class(spec: str, key: str) -> Callable[..., Any]:
    try:
        return load(spec, key, "MODULE:CLASS")
    except NotCallable as error:
        name = spec.removeprefix(ADAPTERS).partition(":")[0]
        if spec.startswith(ADAPTERS) and isinstance(error.__cause__, ImportError):
            raise NotCallable(
                [f"{problem}; pip install 'asyncrl[{name.replace('_', '-')}]'" for problem in error.problems]
            ) from error
        raise


def _tools(code: list[str], options: dict[str, Any], note: Note) -> Player:
    """A player with tools. Options are arguments of the classes."""
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
    return lambda task: make(**{name: task if name == "task" else options[name] for name in names})


def env_player(make: Callable[..., Any], options: dict[str, Any]) -> Player:
    """A player in environments that ``make`` makes: the user's ``reset(task)`` and ``step(message)``, plain or async.

    ``reset`` returns the first messages, or the text of one of the user. ``step`` is given the policy's message (role,
    content, tool_calls) and returns (messages or text, reward, done[, info]): the environment's answer to it, the
    reward of the turn or None, and whether the episode has ended. The reward of an episode is the sum of those of its
    turns. Each episode has an object of its own, whose ``close``, if it has one, is called however the episode ends.
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
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(
            f"step() returned {reprlib.repr(value)}; (messages or text, reward or None, done[, info]) is expected"
        )
    return value[0], value[1], bool(value[2])


def _messages(said: Any, method: str) -> list[Mapping[str, Any]]:
    if said is None:
        return []
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages: list[Any] = [None]
    if isinstance(said, Mapping):
        messages = [said]
    elif isinstance(said, list | tuple):
        messages = list(said)
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise TypeError(
            f"{method}() said {reprlib.repr(said)}; text, a message with a role, or a list of such is expected"
        )
    return messages

"""From the configuration to a player: the user's function, environment or tools, found and held against their options.

Invariant: what can be wrong before the first episode is found by ``resolve``, which raises NotCallable with a line for
each problem; nothing of the user's is made or called by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncrl.episodes.env import env_player
from asyncrl.episodes.function import GIVEN, Player, function_player
from asyncrl.episodes.task import Task
from asyncrl.episodes.tools import Note, Tool, methods, tools_player
from asyncrl.runtime.workers.user_code import Keys, NotCallable, accepted, describe, load

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
    """A player with tools. Options are those of the classes, or, where there is none, of the functions."""
    functions: list[Tool] = []
    classes: list[Callable[[Task], Any]] = []
    names: list[str] = []
    keys = Keys("episode.tools", OPTIONS)
    loaded = [(spec, load(spec, keys.code, "MODULE:FUNCTION or MODULE:CLASS")) for spec in code]
    problems = []
    if options and not any(inspect.isclass(each) for _, each in loaded):
        problems.append(f"{OPTIONS}: are for tools that are classes, and there is none in episode.tools")
    for spec, each in loaded:
        try:
            if inspect.isclass(each):
                classes.append(_maker(each, options, accepted(spec, each, ("task",), options, keys)))
                found = [Tool(name, method) for name, method in methods(each)]
                names += [tool.name for tool in found]
                if not found:
                    problems.append(f"{keys.code}: {spec} has no public method, so there is no tool in it")
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

"""From ``reward.function`` to a callable: found, checked against its options, called with what it accepts.

A function is given by keyword, and only what its signature accepts, of

    per trajectory   prompt: str, completion: str, row: dict, finish_reason: str, messages: list[dict]
    per group        prompt: str, completions: list[str], row: dict, finish_reasons: list[str],
                     conversations: list[list[dict]]

and ``reward.options``. Messages are those of an episode, as in OpenAI's chat completions; there are none where a prompt
has one response. The function returns a number or a mapping of components (see outcome.py), for a group a list of them,
and may be async. Invariant: what can be wrong before the first call is found by ``resolve``, which raises NotCallable
with a line for each problem.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from asyncrl.reward.frames import Setup, Task
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.judges import JUDGES
from asyncrl.reward.outcome import Outcome, read_outcome, read_outcomes

GIVEN = {
    "trajectory": ("prompt", "completion", "row", "finish_reason", "messages"),
    "group": ("prompt", "completions", "row", "finish_reasons", "conversations"),
}
Scorer = Callable[[Task], list[Outcome]]


class NotCallable(ValueError):
    """``problems``: a line for each, beginning with its key in the configuration."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def resolve(setup: Setup, runner: asyncio.Runner) -> Scorer:
    """The function as one that scores a task; coroutines are awaited in ``runner``."""
    options = setup.options
    if setup.function in BUILT_IN:
        if setup.per == "group":
            raise NotCallable(
                [f"reward.per: {setup.function} scores single trajectories; group needs a MODULE:FUNCTION"]
            )
        function, options = _make(setup.function, options), {}
    elif ":" in setup.function:
        function = _load(setup.function)
    else:
        known = [*BUILT_IN, *JUDGES]
        raise NotCallable(
            [
                f"reward.function: there is no built-in function {setup.function!r}"
                f"{did_you_mean(setup.function, known)}; built in are {', '.join(known)}, "
                "and MODULE:FUNCTION names one of your own"
            ]
        )
    given = GIVEN[setup.per]
    names = _accepted(setup.function, function, given, options)
    passed = {name: options[name] for name in names if name in options}

    def call(**values: Any) -> Any:
        value = function(**{name: values[name] for name in names if name in values}, **passed)
        if type(value) is float:
            return value
        return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def score_each(task: Task) -> list[Outcome]:
        return [
            read_outcome(
                call(prompt=task.prompt, completion=text, row=task.row, finish_reason=reason, messages=messages)
            )
            for text, reason, messages in zip(task.completions, task.finish_reasons, conversations(task), strict=True)
        ]

    def score_group(task: Task) -> list[Outcome]:
        value = call(
            prompt=task.prompt,
            completions=task.completions,
            row=task.row,
            finish_reasons=task.finish_reasons,
            conversations=conversations(task),
        )
        return read_outcomes(value, len(task.completions))

    return score_group if setup.per == "group" else score_each


def conversations(task: Task) -> list[list[dict[str, Any]]]:
    """The messages of each completion, none where there is but its text."""
    return task.conversations or [[] for _ in task.completions]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _make(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    maker = BUILT_IN[name]
    _accepted(name, maker, (), options)
    try:
        return maker(**options)
    except ImportError as error:
        raise NotCallable(
            [f"reward.function: {name} needs a package that is not there ({error}); install asyncrl[train]"]
        ) from error
    except (TypeError, ValueError) as error:
        raise NotCallable([f"reward.options: {error}"]) from error


def _load(spec: str) -> Callable[..., Any]:
    module_name, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise NotCallable([f"reward.function: {spec!r} is not of the form MODULE:FUNCTION"])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise NotCallable([f"reward.function: {_import_failure(module_name, error)}"]) from error
        near = did_you_mean(module_name, _modules_beside(error.name))
        raise NotCallable(
            [
                f"reward.function: there is no module {error.name!r}{near}; "
                f"it must be installed or lie in the working directory ({os.getcwd()})"
            ]
        ) from error
    except BaseException as error:
        # A module may raise anything at all, SystemExit included, while it is imported.
        raise NotCallable([f"reward.function: {_import_failure(module_name, error)}"]) from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if hasattr(module, name):
        raise NotCallable([f"reward.function: {name} of {module_name} is {type(function).__name__}, not a function"])
    near = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)])
    raise NotCallable([f"reward.function: module {module_name} ({module.__file__}) has no {name!r}{near}"])


def _accepted(name: str, function: Callable[..., Any], given: Iterable[str], options: dict[str, Any]) -> list[str]:
    """The keywords to call ``function`` with. Raises NotCallable for what it needs or refuses."""
    given = list(given)
    problems = [f"reward.options.{key}: {name} is given this with each call" for key in options if key in given]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Functions of extension modules may have no signature.
        return [*given, *options]
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind == parameter.POSITIONAL_ONLY:
            problems.append(f"reward.function: {name} takes {parameter.name!r} by position only; give it a keyword")
        elif parameter.name not in (*given, *options):
            offered = f"; with each call it is given {', '.join(given)}" if given else ""
            problems.append(f"reward.options.{parameter.name}: is required by {name}{offered}")
    if not takes_any:
        near = keywords - set(given)
        problems += [
            f"reward.options.{key}: {name} takes no such option{did_you_mean(key, near)}"
            for key in options
            if key not in keywords and key not in given
        ]
    if problems:
        raise NotCallable(problems)
    return [key for key in (*given, *options) if takes_any or key in keywords]


def _import_failure(module: str, error: BaseException) -> str:
    return f"importing {module} failed: {describe(error)}"


def describe(error: BaseException) -> str:
    """An exception in a line: type, text, and its place."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    place = _place(error)
    return f"{type(error).__name__}{': ' if text else ''}{text[:2000]}{f' ({place})' if place else ''}"


def kind_of(error: BaseException) -> str:
    """An exception without its text: type and place."""
    return f"{type(error).__name__} {_place(error)}".strip()


def _place(error: BaseException) -> str:
    """FILE:LINE, the innermost in the user's own code, or in a library where none of it is there; or nothing."""
    here = os.path.dirname(__file__)
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) != here and "importlib" not in frame.filename
    ]
    own = [frame for frame in theirs if not frame.filename.startswith(_LIBRARIES)] or theirs
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to say behind a name that is not known; nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _modules_beside(module: str) -> list[str]:
    """Names that ``module`` could have been: those of its package, or of the working directory."""
    package, _, _ = module.rpartition(".")
    if package:
        found = getattr(sys.modules.get(package), "__path__", [])
        return [f"{package}.{info.name}" for info in pkgutil.iter_modules(found)]
    return [info.name for info in pkgutil.iter_modules([os.getcwd()])]

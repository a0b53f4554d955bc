"""A user's function or class: loads MODULE:NAME, checks its signature, and describes its exceptions.

Invariant: ``load`` and ``accepted`` raise NotCallable with a line for each problem that can be found before the first
call. A line begins with the key of the configuration.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.core.files import find_source
from asyncrl.rpc.wire.codec import encodable

MOST_KINDS = 16
OTHERS = "others"
PLACES = "ASYNCRL_PLACES"
"""Name of a mapping in a module that a program has written: FILE:LINE of its functions by name."""
LONGEST_TEXT = 600


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of the configuration for MODULE:NAME (``code``) and for its options (``options``)."""

    code: str
    options: str


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """The first frame from a worker: problems of the configuration, a line each; empty if the code can be called."""

    problems: list[str] = []


class NotCallable(ValueError):
    """The user's code cannot be called. ``problems`` has a line for each, beginning with its configuration key."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def load(spec: str, key: str, form: str = "MODULE:FUNCTION") -> Callable[..., Any]:
    """Import the function or class that ``spec`` (MODULE:NAME) names; ``key`` is its configuration key in errors.

    ``form`` describes the expected form of ``spec``. Raises NotCallable.
    """
    module_name, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise NotCallable([f"{key}: {spec!r} is not of the form {form}"])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The named module exists, but imports one that does not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise NotCallable([f"{key}: {_import_failure(module_name, error)}"]) from error
        near = did_you_mean(module_name, _modules_beside(error.name))
        raise NotCallable(
            [
                f"{key}: there is no module {error.name!r}{near}; "
                f"it must be installed or be in the working directory ({os.getcwd()})"
            ]
        ) from error
    except BaseException as error:
        # A module may raise anything at all, SystemExit included, while it is imported.
        raise NotCallable([f"{key}: {_import_failure(module_name, error)}"]) from error
    try:
        function = getattr(module, name)
    except AttributeError as error:
        # Built-in modules have no file.
        file = getattr(module, "__file__", None)
        near = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)])
        where = f" ({file})" if file else ""
        raise NotCallable([f"{key}: module {module_name}{where} has no {name!r}{near}"]) from error
    except BaseException as error:
        # The module's own ``__getattr__`` may raise anything.
        raise NotCallable([f"{key}: looking up {name} of {module_name} failed: {describe(error)}"]) from error
    if not callable(function):
        raise NotCallable([f"{key}: {name} of {module_name} is {type(function).__name__}, not a function"])
    return function  # type: ignore[no-any-return]


def accepted(
    name: str, function: Callable[..., Any], given: Iterable[str], options: dict[str, Any], keys: Keys
) -> list[str]:
    """Return the keywords with which to call ``function``: those of ``given`` and ``options`` that it accepts.

    ``given`` are passed with each call and may be ignored. ``options`` are the user's, and must all be accepted. If
    ``function`` has no readable signature, all of them are returned. Otherwise raises NotCallable for an option that is
    unknown or among ``given``, and for a required parameter that has no value or no keyword.
    """
    given = list(given)
    problems = [f"{keys.options}.{key}: {name} is given this with each call" for key in options if key in given]
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
            problems.append(f"{keys.code}: {name} takes {parameter.name!r} by position only; give it a keyword")
        elif parameter.name not in (*given, *options):
            available = f"; with each call it is given {', '.join(given)}" if given else ""
            if "row" in given:
                available += f"; a column of the data is row[{parameter.name!r}]"
            problems.append(f"{keys.options}.{parameter.name}: is required by {name}{available}")
    if not takes_any:
        option_names = keywords - set(given)
        problems += [
            f"{keys.options}.{key}: {name} takes no such option{did_you_mean(key, option_names)}"
            for key in options
            if key not in keywords and key not in given
        ]
    if problems:
        raise NotCallable(problems)
    return [key for key in (*given, *options) if takes_any or key in keywords]


def _import_failure(module: str, error: BaseException) -> str:
    return f"importing {module} failed: {describe(error)}"


class FaultKinds:
    """Counts failures of users' code by kind, and keeps the first case of each kind.

    Invariant: there are at most MOST_KINDS kinds; further ones are counted together as OTHERS.
    """

    def __init__(self) -> None:
        self._first_cases: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, text: str) -> tuple[str, str, int]:
        """Count a failure. Returns its kind, the first case of that kind in one line, and its count."""
        if kind not in self._first_cases and len(self._first_cases) >= MOST_KINDS - 1:
            kind, text = OTHERS, f"has failed in further ways, first: {text}"
        line = " ".join(text.split())
        if len(line) > LONGEST_TEXT:
            # Keep the end too, because it has the place.
            line = f"{line[: LONGEST_TEXT // 2]} ... {line[-LONGEST_TEXT // 2 :]}"
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return kind, self._first_cases.setdefault(kind, line), self._counts[kind]


def describe(error: BaseException) -> str:
    """Describe an exception: type, text, and place (FILE:LINE)."""
    try:
        text = str(error)
    except Exception:
        text = "(its text raises an error)"
    place = _place(error)
    return encodable(f"{type(error).__name__}{': ' if text else ''}{text[:2000]}{f' ({place})' if place else ''}")


def kind_of(error: BaseException) -> str:
    """Identify a kind of exception: its type and place, without its text."""
    return encodable(f"{type(error).__name__} {_place(error)}".strip())


def find_place(spec: str) -> str:
    """FILE:LINE of the definition of MODULE:NAME, found without an import.

    Only FILE if the name is not found in it, at its top level or in PLACES; empty if there is no module.

    Searches for the module as an import would: in the working directory, then on the path.
    """
    module, _, name = spec.partition(":")
    path = find_source(module) if name else None
    if path is None:
        return ""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return str(path)
    node = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(node, ast.stmt):
        return f"{path}:{node.lineno}"
    places = (node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == PLACES)
    made: dict[str, str] = next((ast.literal_eval(node.value) for node in places), {})
    return made.get(name, str(path))


def _place(error: BaseException) -> str:
    """FILE:LINE of the innermost frame in the user's own code, else in a library; empty if there are only our own."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN_CODE) and "importlib" not in frame.filename
    ]
    users_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{users_frames[-1].filename}:{users_frames[-1].lineno}" if users_frames else ""


_OWN_CODE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error text that suggests names of ``known`` close to ``name``; empty if no name is close."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _modules_beside(module: str) -> list[str]:
    """Names of the modules in the package of ``module``, or in the working directory, to suggest instead."""
    package, _, _ = module.rpartition(".")
    if package:
        folders = getattr(sys.modules.get(package), "__path__", [])
        return [f"{package}.{info.name}" for info in pkgutil.iter_modules(folders)]
    return [info.name for info in pkgutil.iter_modules([os.getcwd()])]

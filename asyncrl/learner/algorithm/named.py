"""The functions that ``learner.loss`` and ``learner.advantage`` name: one of ours by its name, one of the user's by
MODULE:FUNCTION. Ours are declared where they are written (``BuiltIn.add``), with their rows of docs/algorithms.md.

Fails with ConfigError naming the key when there is no such function, or it does not take its options.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.workers.user_code import Keys, NotCallable, accepted, did_you_mean, load

_Function = TypeVar("_Function", bound=Callable[..., Any])


class BuiltIn(dict[str, Any]):
    """Functions of ours by name, filled by decorating them, with the rows of docs/algorithms.md about them."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, tuple[str, str]] = {}

    def add(self, formula: str, use: str) -> Callable[[_Function], _Function]:
        """Decorate a function: its name is found from now on. ``formula`` and ``use`` are cells of the page."""

        def enter(function: _Function) -> _Function:
            name = function.__name__
            self[name], self._rows[name] = function, (formula, use)
            return function

        return enter

    def document(self, *columns: str) -> str:
        """The table of docs/algorithms.md: columns for the name, the formula, ``options`` or none, and the use."""
        rows = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for name, (formula, use) in self._rows.items():
            options = [_options(self[name])] if "options" in columns else []
            rows.append(f"| {' | '.join([f'`{name}`', formula, *options, use])} |")
        return "\n".join(rows)


def _options(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(f"`{p.name}` = {p.default}" for p in parameters if p.kind == p.KEYWORD_ONLY)


def find_function(key: str, spec: str, module: str, given: str, options: Mapping[str, Any]) -> partial[Any]:
    """The function that ``spec``, the value of ``key``, names, with ``options`` (the value of KEY_options) filled in.

    ``module`` holds those of ours; ``given`` is the keyword that the function is called with. Raises ConfigError.
    """
    ours: Mapping[str, Callable[..., Any]] = importlib.import_module(module).BUILT_IN
    try:
        if ":" in spec:
            function = load(spec, key)
        elif spec in ours:
            function = ours[spec]
        else:
            near = did_you_mean(spec, list(ours))
            known = f"built in are {', '.join(ours)}, and MODULE:FUNCTION names one of your own"
            raise ConfigError([f"{key}: there is no built-in {key.rpartition('.')[2]} {spec!r}{near}; {known}"])
        if given not in accepted(spec, function, [given], dict(options), Keys(key, f"{key}_options")):
            raise ConfigError([f"{key}: {spec} does not take {given!r}, which is what it is called with"])
    except NotCallable as error:
        raise ConfigError(error.problems) from error
    return partial(function, **options)

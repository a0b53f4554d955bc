"""The built-in losses and advantages by name, with their rows of the tables in docs/algorithms.md.

Each function is registered where it is written, by the decorator ``BuiltIn.add``. user_functions.py looks up the one
that a run uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class BuiltIn(dict[str, Any]):
    """A registry: functions by name, filled by the decorator ``add``."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, tuple[str, str]] = {}
        """Formula and use of each function, by name: its row of the docs."""

    def add(self, formula: str, use: str) -> Callable[[_Function], _Function]:
        """Decorator: register a function under its own name. ``formula`` and ``use`` go into its row of the docs."""

        def enter(function: _Function) -> _Function:
            name = function.__name__
            self[name], self._rows[name] = function, (formula, use)
            return function

        return enter

    def document(self, *columns: str) -> str:
        """The table of docs/algorithms.md with these headings. The column ``options`` lists keyword arguments."""
        rows = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for name, (formula, use) in self._rows.items():
            options = [_options(self[name])] if "options" in columns else []
            rows.append(f"| {' | '.join([f'`{name}`', formula, *options, use])} |")
        return "\n".join(rows)


def _options(function: Callable[..., Any]) -> str:
    """List the keyword-only parameters of a function and their defaults, as Markdown."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(f"`{p.name}` = {p.default}" for p in parameters if p.kind == p.KEYWORD_ONLY)

"""Words for the type of a key and for its default, as --help-config and docs/configuration.md show them.

Invariant: a bound that pydantic checks stands in the words. A type without words is an error of the program.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

_PLAIN = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any value"}


def type_words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """The type with its bounds, as "integer > 0"; that a key may be left out is no part of it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = [
            bound for each in arguments[1:] for bound in (each.metadata if isinstance(each, FieldInfo) else [each])
        ]
        return type_words(arguments[0], inner)
    if origin in (Union, UnionType):
        return _either(type_words(each, metadata) for each in arguments if each is not NoneType)
    if origin is Literal:
        return _either(json.dumps(each) for each in arguments)
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_words, arguments))}]"
    if origin is dict:
        return "table" if arguments[1] is Any else f"table of {type_words(arguments[1])}"
    return f"{_PLAIN[kind]}{_bounds(metadata)}"


def default_words(value: Any) -> str:
    """The value as TOML has it, or "unset"."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {default_words(each)}' for key, each in value.items())} }}" if value else "{}"
    return "unset" if value is None else json.dumps(value)


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _bounds(metadata: Sequence[Any]) -> str:
    found = {
        name: value
        for each in metadata
        for name in ("gt", "ge", "lt", "le", "pattern")
        if (value := getattr(each, name, None)) is not None
    }
    if (pattern := found.pop("pattern", None)) is not None:
        return f" matching `{pattern}`"
    if found.keys() == {"ge", "le"}:
        return f" {_number(found['ge'])} to {_number(found['le'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return "".join(
        f"{' and' * (at > 0)} {signs[name]} {_number(value)}" for at, (name, value) in enumerate(found.items())
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

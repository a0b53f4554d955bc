"""Columns of a row by name, also nested ones: ``reward_model.ground_truth``. Pure.

Invariant: a column whose own name holds the dots wins over the nested one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MISSING = object()


def column_of(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of the column ``key``, or ``default`` if the row has no such column. Dots lead into objects."""
    found = _find(row, key)
    return default if found is _MISSING else found


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Whether the row has the column ``key``; its value may be None."""
    return _find(row, key) is not _MISSING


def column_names(row: Mapping[str, Any]) -> list[str]:
    """The names of all columns in the order of the row, those inside objects as dotted names."""
    return list(_names(row, ""))


def _find(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    dot = key.find(".")
    while dot >= 0:
        inner = row.get(key[:dot])
        if isinstance(inner, Mapping) and (found := _find(inner, key[dot + 1 :])) is not _MISSING:
            return found
        dot = key.find(".", dot + 1)
    return _MISSING


def _names(row: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"

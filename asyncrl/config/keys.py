"""The keys of the configuration, and words for what is wrong with one."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
from itertools import pairwise
from typing import Any, get_args

from pydantic.fields import FieldInfo

from asyncrl.config import Config
from asyncrl.config.section import Section


def known_keys() -> list[tuple[str, str, str, str]]:
    """Each key as (dotted key, type, default, description), tables descended into; NAME stands for a free name."""
    rows: list[tuple[str, str, str, str]] = []

    def visit(section: type[Section], prefix: str) -> None:
        descriptions = _docstrings(section)
        for name, field in section.model_fields.items():
            key = prefix + name
            kind = field.annotation
            arguments = get_args(kind)
            if isinstance(kind, type) and _is_section(kind):
                visit(kind, key + ".")
            elif arguments and _is_section(arguments[-1]):
                visit(arguments[-1], key + ".NAME.")
            else:
                default = "required" if field.is_required() else json.dumps(field.default)
                rows.append((key, _type_name(kind), default, descriptions.get(name, "")))

    visit(Config, "")
    return rows


def _docstrings(section: type[Section]) -> dict[str, str]:
    """The docstring below each field of a table, by the field's name; a table has those of the one it derives from."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if _is_section(each):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(body, ast.ClassDef)
            for field, text in pairwise(body.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def describe(path: tuple[str, ...], item: Any) -> str:
    """One line on what pydantic found wrong at ``path``; ``item`` is an entry of ``ValidationError.errors()``."""
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _siblings(path), n=1, cutoff=0.5)
        if not near:
            everywhere = {known.rsplit(".", 1)[-1]: known for known, *_ in known_keys()}
            match = difflib.get_close_matches(path[-1], everywhere, n=1, cutoff=0.8)
            near = [everywhere[match[0]]] if match else []
        return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        keys = ", ".join(f"{key}.{each}" for each in _siblings((*path, "")))
        return f"{key}: is a table (got {item['input']!r}); its keys are {keys}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: {message} (got {item['input']!r})"


def holds_text(key: str) -> bool:
    """Whether any text may be the value of a dotted key, and no number."""
    *_, last = path = key.split(".")
    field = _fields(tuple(path)).get(last)
    return field is not None and field.annotation in (str, str | None)


def _siblings(path: tuple[str, ...]) -> list[str]:
    """The keys known where the last part of ``path`` stands."""
    return list(_fields(path))


def _fields(path: tuple[str, ...]) -> dict[str, FieldInfo]:
    """Fields of the section in which the last part of ``path`` stands; none if there is no such section."""
    section: Any = Config
    named = False
    for part in path[:-1]:
        if named:
            # A table of named tables: whatever the name, the section is the same.
            named = False
            continue
        field = section.model_fields.get(part)
        if field is None:
            return {}
        kind, arguments = field.annotation, get_args(field.annotation)
        named = bool(arguments) and _is_section(arguments[-1])
        inner = arguments[-1] if named else kind
        if not _is_section(inner):
            return {}
        section = inner
    fields: dict[str, FieldInfo] = section.model_fields
    return fields


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)

"""Describes the keys of the configuration in text: type, default and docstring of each, and errors with advice."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from asyncrl.config import Config
from asyncrl.config.section import Section
from asyncrl.config.training import SOURCE_KEYS, PromptsConfig
from asyncrl.core.other_names import describe_meaning, meaning_of

MOST_ADVICE = 8
"""Largest number of keys in an unknown table for which an error gives advice."""
SHARED_KEYS = {
    "episode": "all sources share [episode]; let its function choose by task.row",
    "advantage": "all sources share learner.advantage, which sees whole steps",
    "max_tokens": "all sources share rollout.max_tokens",
    "samples_per_prompt": "all sources share rollout.samples_per_prompt",
    "curriculum": "all sources share [data.curriculum]",
}
"""Keys that a source of a mixture cannot have, and what to set instead."""
_PLAIN = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any value"}


def known_keys() -> list[tuple[str, str, str, str]]:
    """Return (dotted key, type, default, description) of every key. NAME stands for a name that the user chooses."""
    rows: list[tuple[str, str, str, str]] = []

    def visit(section: type[Section], prefix: str) -> None:
        descriptions = docstrings(section)
        listed: dict[str, type[Section]] = {}  # Sections of the keys that may be a list of tables.
        for name, field in section.model_fields.items():
            key = prefix + name
            if (item := listed_table_of(field)) is not None:
                listed[key] = item
            if (table := table_of(field)) is not None:
                inner, is_named = table
                visit(inner, f"{key}.NAME." if is_named else f"{key}.")
            else:
                default = "required" if field.is_required() else default_words(field.default)
                # An evaluation inherits these keys from [data].
                if prefix == "eval.NAME.data." and name in PromptsConfig.model_fields and name not in SOURCE_KEYS:
                    default = f"that of data.{name}"
                rows.append((key, type_words(field.annotation, field.metadata), default, descriptions.get(name, "")))
        for key, item in listed.items():
            visit(item, f"{key}.NAME.")

    visit(Config, "")
    return rows


def table_of(field: FieldInfo) -> tuple[type[Section], bool] | None:
    """Return the section of a field that is a table, and whether the field is a dict of sections by the user's names.

    None for a field that holds a value.
    """
    annotation = field.annotation
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each, get_origin(annotation) is dict
    return None


def listed_table_of(field: FieldInfo) -> type[Section] | None:
    """Return the section of a field that may hold a list of tables with names of their own; None for other fields."""
    inner = [get_args(each)[0] for each in get_args(field.annotation) if get_origin(each) is Annotated]
    items = (get_args(each)[0] for each in inner if get_origin(each) is list)
    return next((item for item in items if isinstance(item, type) and issubclass(item, Section)), None)


def docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each field of a section and its base classes, by the field's name. Reads the source."""
    texts: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if issubclass(each, Section):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(body, ast.ClassDef)
            for field, text in pairwise(body.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    texts[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def describe(path: tuple[str, ...], item: Any) -> str:
    """Return the line of an error at ``path``. ``item`` is an entry of pydantic's ``ValidationError.errors()``."""
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        of_sources = SHARED_KEYS.get(path[-1]) if path[:2] == ("data", "source") else None
        return f"{key}: {of_sources or 'unknown key' + _advice(path, item['input'])}"
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        keys = ", ".join(f"{key}.{each}" for each in _fields(path))
        return f"{key}: is a table (got {item['input']!r}); its keys are {keys}"
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{key}: {message} (got {item['input']!r})"


def holds_text(key: str) -> bool:
    """Return whether the value of a dotted key is always text, even if a flag looks like a number."""
    *table, last = key.split(".")
    field = _fields(tuple(table)).get(last)
    return field is not None and field.annotation in (str, str | None)


def _advice(path: tuple[str, ...], value: Any) -> str:
    """Return advice on an unknown key for the end of its error, such as "; did you mean learner.lr?", or "".

    An unknown table is compared with the keys of its section. If none is similar, each key inside it is looked up.
    A value, or a table without advice so far, is looked up as a name of another system (TRL, verl). This comes before
    similar spellings of a value, because the meaning of such a name is exact.
    """
    siblings = list(_fields(path[:-1]))
    if isinstance(value, dict):
        if near := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.8):
            return f"; did you mean {near[0]}?"
        if inner := list(_advice_inside(path, value)):
            more = len(inner) - MOST_ADVICE
            return "".join(f"; {each}" for each in inner[:MOST_ADVICE]) + (f"; and {more} more" if more > 0 else "")
    if found := _meaning_at(path):
        return f"; {found}"
    # The key may be missing a table: eval.NAME.path for eval.NAME.data.path.
    for table in siblings:
        if path[-1] in _fields((*path[:-1], table)):
            return f"; did you mean {'.'.join((*path[:-1], table, path[-1]))}?"
    if near := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.5):
        return f"; did you mean {near[0]}?"
    # A key of another section is proposed only if it is nearly the same word.
    everywhere = _keys_by_name()
    match = difflib.get_close_matches(path[-1], everywhere, n=1, cutoff=0.8)
    return f"; did you mean {everywhere[match[0]]}?" if match else ""


def _advice_inside(path: tuple[str, ...], table: dict[str, Any]) -> Iterator[str]:
    """Yield advice for each key in an unknown table that another system uses, or that is a key of another section."""
    for name, value in table.items():
        here = (*path, str(name))
        if isinstance(value, dict):
            yield from _advice_inside(here, value)
        elif found := _meaning_at(here):
            yield f"{'.'.join(here)}: {found}"
        elif str(name) in _keys_by_name():
            yield f"{'.'.join(here)}: did you mean {_keys_by_name()[str(name)]}?"


def _meaning_at(path: tuple[str, ...]) -> str:
    """Return advice on a name of another system, looked up with its table (lora.r) and alone; empty if unknown."""
    meaning = meaning_of("_".join(path[-2:])) or meaning_of(path[-1])
    return describe_meaning(meaning, ".".join(path)) if meaning is not None else ""


def _keys_by_name() -> dict[str, str]:
    """Return dotted keys by their last part; if several end in it, the first one."""
    keys: dict[str, str] = {}
    for key, *_ in known_keys():
        keys.setdefault(key.rsplit(".", 1)[-1], key)
    return keys


def _fields(table_path: tuple[str, ...]) -> dict[str, FieldInfo]:
    """Return the fields of the section at ``table_path`` by name; () is the whole configuration.

    Empty if the path leads to no section.
    """
    section: type[Section] = Config
    is_named = False
    for part in table_path:
        if is_named:
            # This part is a name that the user has chosen; its section is known already.
            is_named = False
            continue
        field = section.model_fields.get(part)
        item = listed_table_of(field) if field is not None else None
        table = (item, True) if item is not None else table_of(field) if field is not None else None
        if table is None:
            return {}
        section, is_named = table
    return section.model_fields


def type_words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a type with its bounds as text, for example "integer > 0". None in a union is left out.

    Bounds on the number of entries of a list, tuple or table, and largest lengths of texts, are left out. Raises
    KeyError for a type that has no text.
    """
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
    if origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], Section):
        return "list of tables"
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_words, arguments))}]"
    if origin is dict:
        return "table" if arguments[1] is Any else f"table of {type_words(arguments[1])}"
    return f"{_PLAIN[kind]}{_bounds(metadata)}"


def default_words(value: Any) -> str:
    """Return a default as TOML text; "unset" for None."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {default_words(each)}' for key, each in value.items())} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(default_words, value))}]"
    return "unset" if value is None else json.dumps(value)


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _bounds(metadata: Sequence[Any]) -> str:
    """Return pydantic's bounds of a type as the text that follows it, for example " > 0"."""
    bounds = {
        name: value
        for each in metadata
        for name in ("gt", "ge", "lt", "le", "pattern", "min_length")
        if (value := getattr(each, name, None)) is not None
    }
    if (pattern := bounds.pop("pattern", None)) is not None:
        return f" matching `{pattern}`"
    if (least := bounds.pop("min_length", None)) is not None:
        return f" of {least} or more characters"
    if bounds.keys() == {"ge", "le"}:
        return f" {_number(bounds['ge'])} to {_number(bounds['le'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return "".join(
        f"{' and' * (at > 0)} {signs[name]} {_number(value)}" for at, (name, value) in enumerate(bounds.items())
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

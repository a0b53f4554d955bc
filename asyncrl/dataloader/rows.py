"""Rows of a dataset: checked, made fit for the wire, and fingerprinted.

Invariant: a Row's content survives MessagePack and JSON, and the fingerprint depends on prompts, rows and their order
alone, not on where they were read from. A row that cannot be used ends the reading with DataError (file and line of
the first, how many more there are), or is left out and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from asyncrl.chat.messages import Tool
from asyncrl.chat.prompt import Prompt, read_prompt
from asyncrl.chat.row_messages import read_tools, without_nulls
from asyncrl.config.training import DataConfig
from asyncrl.data.columns import column_names, column_of, has_column
from asyncrl.data.jsonl import RawRow
from asyncrl.errors import ChatRefused, DataError

LISTED_PROBLEMS = 5
KEPT_PROBLEMS = 1000
MEND = 'mend it, or leave such rows out with data.on_bad_row = "skip"'

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, Any])


class BadRow(ValueError):
    """The problem of one row."""


class TooFewUsable(DataError):
    """The rows were read, and none, or too small a share, can be used."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One usable row."""

    prompt: Prompt
    packed: bytes
    """All its columns as MessagePack: a fraction of the memory, and immutable."""
    path: str
    line: int
    tools: list[Tool] = field(default_factory=list)
    """Tools that the model is shown with the prompt."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows in the order of their source."""

    rows: list[DataRow]
    fingerprint: str
    """Hex digest of the content."""
    skipped: int
    """Rows left out under on_bad_row = "skip"."""
    first_skipped: str = ""
    """The first of them: FILE:LINE and its problem."""


def unpack(packed: bytes) -> dict[str, Any]:
    """The row as the reward function sees it."""
    return _DECODER.decode(packed)


def collect(source: str, raw_rows: Iterable[RawRow], data: DataConfig) -> Dataset:
    """Check all rows of ``source`` (its name in errors). Raises DataError."""
    rows: list[DataRow] = []
    bad: list[tuple[RawRow, str]] = []
    skipped = 0
    for raw in raw_rows:
        try:
            row = check_row(raw, data)
        except BadRow as error:
            skipped += 1
            if len(bad) < KEPT_PROBLEMS:
                bad.append((raw, str(error)))
            continue
        rows.append(row)
    if bad and data.on_bad_row == "error":
        first, problem = bad[0]
        others = ", ".join(f"{raw.path}:{raw.line}" for raw, _ in bad[1 : 1 + LISTED_PROBLEMS])
        more = f"; {skipped - 1} more bad rows ({others}{', …' if skipped > LISTED_PROBLEMS + 1 else ''})"
        raise DataError(problem + (more if others else ""), path=first.path, line=first.line, fix=MEND)
    first_skipped = f"{bad[0][0].path}:{bad[0][0].line}: {bad[0][1]}" if bad else ""
    if not rows:
        raise nothing_usable(source, first_skipped)
    return Dataset(rows, fingerprint_of(rows), skipped, first_skipped)


def nothing_usable(source: str, first_bad: str) -> TooFewUsable:
    """``first_bad`` is the first row that cannot be used, with its problem; empty where there is no row at all."""
    if first_bad:
        return TooFewUsable(f"holds no usable row ({first_bad})", path=source, fix="mend them")
    return TooFewUsable("holds no row", path=source, fix="put the prompts there, or set another path")


def fingerprint_of(rows: Iterable[DataRow]) -> str:
    """Hex digest of prompts, tools, rows and their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        # The length marks the row's end, so that no other rows come to the same bytes.
        digest.update(_ENCODER.encode((row.prompt, len(row.packed), *([row.tools] if row.tools else []))))
        digest.update(row.packed)
    return digest.hexdigest()


def check_row(raw: RawRow, data: DataConfig) -> DataRow:
    """The row that ``raw`` holds, by the keys of its set. Raises BadRow."""
    prompt_key, tools_key = data.prompt_column, data.tools_column
    if raw.problem:
        raise BadRow(raw.problem)
    if not isinstance(raw.value, dict):
        raise BadRow(f"a row must be an object, not {_kind(raw.value)}")
    if not has_column(raw.value, prompt_key):
        raise BadRow(missing_column(prompt_key, column_names(raw.value)))
    try:
        columns = msgspec.to_builtins(raw.value, enc_hook=_simplify)
        if raw.typed:
            _leave_out_nulls(columns, prompt_key, tools_key)
        packed = _ENCODER.encode(columns)
        # Keys of odd types are written without complaint and found out by the reader.
        unpack(packed)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRow(f"cannot be sent as JSON or MessagePack: {error}") from None
    try:
        prompt = read_prompt(column_of(columns, prompt_key), prompt_key, continues=data.continue_final_message)
    except ChatRefused as error:
        raise BadRow(str(error)) from None
    try:
        tools = read_tools(column_of(columns, tools_key), tools_key) if tools_key else []
    except ChatRefused as error:
        raise BadRow(f'{error} (if the column is not for the model, set data.tools_key = "")') from None
    return DataRow(prompt, packed, raw.path, raw.line, tools)


def _leave_out_nulls(columns: dict[str, Any], prompt_key: str, tools_key: str) -> None:
    """Take the nulls out of calls and tools, where a typed table has one for each field that another row has."""
    tools = column_of(columns, tools_key)
    if isinstance(tools, list):
        tools[:] = without_nulls(tools)
    prompt = column_of(columns, prompt_key)
    for message in prompt if isinstance(prompt, list) else ():
        if isinstance(message, dict) and message.get("tool_calls"):
            message["tool_calls"] = without_nulls(message["tool_calls"])


def missing_column(prompt_key: str, columns: Iterable[str]) -> str:
    """Words for a missing prompt column."""
    return f"has no column {prompt_key!r}; it has {', '.join(map(repr, columns)) or 'none'} (set data.prompt_key)"


def _simplify(value: Any) -> Any:
    """A plain value for one of a type that msgspec does not know."""
    if isinstance(value, str):
        # numpy.str_, which msgspec refuses although it is text.
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)

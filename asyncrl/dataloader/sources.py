"""The sources of prompts, by their name in the configuration, and the rows that they give.

Files are read as streams, so that none is in memory whole. Reading blocks and may take minutes: it belongs on a thread.
A row is checked, made fit for the wire, and fingerprinted.

Invariant: the content of a Row survives MessagePack and JSON. The fingerprint depends on prompts, rows and their order
alone, not on the place they were read from. A row that cannot be used ends the reading with DataError (file and line of
the first, and the number of the others), or is left out and counted. Fails with DataError for unreadable files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.training import DataConfig
from asyncrl.core.errors import ChatRefused, DataError
from asyncrl.data.columns import column_names, column_of, has_column
from asyncrl.data.files import find_files, no_such
from asyncrl.data.jsonl import RawRow, read_json_rows
from asyncrl.text.chat.messages import Tool
from asyncrl.text.chat.prompt import Prompt, read_prompt
from asyncrl.text.chat.row_messages import read_tools, without_nulls

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


BATCH_ROWS = 1024


def load_dataset(config: DataConfig) -> Dataset:
    """Read and check every row. Raises DataError."""
    return collect(*open_source(config), config)


def open_source(config: DataConfig) -> tuple[str, Iterator[RawRow]]:
    """The source's name and its rows as they are read. Raises DataError if a file is missing, and so does reading."""
    column = config.prompt_column
    if config.source == "reasoning_gym":
        name = f"reasoning_gym/{config.task}"
        return name, _reasoning_gym(config, name)
    if config.source == "synthetic":
        return "synthetic", _synthetic(config.size)
    path = config.path or ""
    kind, files = find_files(path, kind=None if config.source == "auto" else config.source, split=config.split)
    if kind == "hf":
        return path, _hf(path, config.split, column)
    if kind == "parquet":
        return path, _parquet(files, column)
    return path, read_json_rows(files)


def _parquet(files: Sequence[str], prompt_key: str) -> Iterator[RawRow]:
    """One row a record. Raises DataError."""
    pyarrow = _import_pyarrow(files[0])
    from pyarrow import parquet

    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, prompt_key)
                yield from _rows_of(path, file.iter_batches(batch_size=BATCH_ROWS))
        except DataError:
            # It is a ValueError, too, and says already what is wrong.
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"is not a readable Parquet file: {_first_line(error)}", path=path) from None


def _hf(folder: str, split: str, prompt_key: str) -> Iterator[RawRow]:
    """A folder written by ``datasets.save_to_disk``: one dataset, or several splits. Raises DataError."""
    pyarrow = _import_pyarrow(folder)

    here = _split_folder(Path(folder), split)
    state = _read_json(here / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            "holds a selection of rows that was not flattened; call flatten_indices() and save it again",
            path=str(here),
        )
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError("names no data files", path=str(here / "state.json")) from None
    for name in names:
        path = str(here / name)
        try:
            with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
                _check_columns(path, stream.schema.names, prompt_key)
                yield from _rows_of(path, stream)
        except DataError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"is not a readable Arrow file: {_first_line(error)}", path=path) from None


def _split_folder(folder: Path, split: str) -> Path:
    """The folder of one split, or the folder itself when it holds a single dataset."""
    if not folder.is_dir():
        raise no_such("no such folder", str(folder))
    if (folder / "state.json").is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if not splits:
        raise DataError(
            'was not written by save_to_disk; for a folder of Parquet files leave source out, or set it to "parquet"',
            path=str(folder),
        )
    if split not in splits:
        raise DataError(f"has no split {split!r}; it has {', '.join(splits)}", path=str(folder))
    return folder / split


def _check_columns(path: str, columns: list[str], prompt_key: str) -> None:
    # A dotted name leads into an object: its first part is a column, and the rows show the rest.
    if not any(prompt_key == column or prompt_key.startswith(f"{column}.") for column in columns):
        raise DataError(missing_column(prompt_key, columns), path=path)


def _rows_of(path: str, batches: Any) -> Iterator[RawRow]:
    line = 0
    for batch in batches:
        for value in batch.to_pylist():
            line += 1
            yield RawRow(path, line, value, typed=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except ValueError as error:
        raise DataError(f"is not valid JSON: {error}", path=str(path)) from None
    if not isinstance(value, dict):
        raise DataError("is not a JSON object", path=str(path))
    return value


def _import_pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise DataError("needs pyarrow: pip install 'asyncrl[train]'", path=path) from None
    return pyarrow


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _reasoning_gym(config: DataConfig, name: str) -> Iterator[RawRow]:
    """The items of a task, each with everything that its scorer needs.

    Columns: ``task``, ``index``, ``size``, ``seed``, ``options``, ``item`` (the library's own entry), and the item's
    ``question`` and ``answer``.
    """
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise DataError("needs reasoning-gym: pip install 'asyncrl[train]'", path=name) from None
    try:
        dataset = create_dataset(config.task, size=config.size, seed=config.seed, **config.options)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DataError(f"the task cannot be made with these options: {error}", path=name) from None
    for index in range(config.size):
        try:
            item = dataset[index]
        except Exception as error:
            # The library's tasks are code of many authors and raise errors of any kind.
            yield RawRow(name, index + 1, problem=f"the task failed: {type(error).__name__}: {error}")
            continue
        yield RawRow(
            name,
            index + 1,
            {
                "task": config.task,
                "index": index,
                "size": config.size,
                "seed": config.seed,
                "options": config.options,
                "item": item,
                "question": item["question"],
                "answer": item["answer"],
            },
        )


def _synthetic(size: int) -> Iterator[RawRow]:
    """Sums of two numbers: ``question``, ``answer``, ``index``; the same for every run."""
    for index in range(size):
        # Multipliers coprime to the ranges, so that neighbours differ.
        left, right = 10 + index * 37 % 90, 10 + index * 53 % 89
        row = {"question": f"What is {left} + {right}?", "answer": str(left + right), "index": index}
        yield RawRow("synthetic", index + 1, row)

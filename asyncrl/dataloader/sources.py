"""The sources of prompts other than JSON: Parquet, a folder of ``save_to_disk``, reasoning-gym, and made-up sums.

Files are read as streams, so that none is in memory whole. Fails with DataError for unreadable files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.training import PromptsConfig
from asyncrl.core.errors import DataError
from asyncrl.data.rows import RawRow, column_of, no_such
from asyncrl.text.chat.chat_messages import without_nulls

BATCH_ROWS = 1024


def missing_column(prompt_key: str, columns: Iterable[str]) -> str:
    """The error text for a missing prompt column."""
    return f"has no column {prompt_key!r}; it has {', '.join(map(repr, columns)) or 'none'} (set data.prompt_key)"


def parquet(files: Sequence[str], config: PromptsConfig) -> Iterator[RawRow]:
    """Read Parquet files; each record gives one row. Raises DataError."""
    pyarrow = _import_pyarrow(files[0])
    from pyarrow.parquet import ParquetFile

    for path in files:
        try:
            with ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, config.prompt_column)
                yield from _rows_of(path, file.iter_batches(batch_size=BATCH_ROWS), config)
        except DataError:
            # A DataError is a ValueError, so the next clause would catch it.
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"is not a readable Parquet file: {_first_line(error)}", path=path) from None


def hf(folder: str, config: PromptsConfig) -> Iterator[RawRow]:
    """Read a folder written by ``datasets.save_to_disk``, of one dataset or several splits. Raises DataError."""
    pyarrow = _import_pyarrow(folder)

    here = _split_folder(Path(folder), config.split)
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
                _check_columns(path, stream.schema.names, config.prompt_column)
                yield from _rows_of(path, stream, config)
        except DataError:
            # A DataError is a ValueError, so the next clause would catch it.
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
    # A dotted key names a field of an object: only its first part is a column here, and check_row checks the rest.
    if not any(prompt_key == column or prompt_key.startswith(f"{column}.") for column in columns):
        raise DataError(missing_column(prompt_key, columns), path=path)


def _rows_of(path: str, batches: Any, config: PromptsConfig) -> Iterator[RawRow]:
    """Yield the rows, without nulls in tool calls and tools.

    A typed table gives each object all fields that occur in any row, as null where it has none.
    """
    line = 0
    for batch in batches:
        for value in batch.to_pylist():
            line += 1
            tools, prompt = column_of(value, config.tools_column), column_of(value, config.prompt_column)
            if isinstance(tools, list):
                tools[:] = without_nulls(tools)
            for message in prompt if isinstance(prompt, list) else ():
                if isinstance(message, dict) and message.get("tool_calls"):
                    message["tool_calls"] = without_nulls(message["tool_calls"])
            yield RawRow(path, line, value)


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


def reasoning_gym(config: PromptsConfig, name: str) -> Iterator[RawRow]:
    """Generate the items of a reasoning-gym task, each with everything that its scorer needs.

    Columns: ``task``, ``index``, ``size``, ``seed``, ``options``, ``item`` (the library's own entry), and the item's
    ``question`` and ``answer``. An item that fails gives a row with a problem. Raises DataError.
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


def synthetic(size: int) -> Iterator[RawRow]:
    """Generate sums of two numbers, the same for every run. Columns: ``question``, ``answer``, ``index``."""
    for index in range(size):
        # The multipliers are coprime to the ranges, so that neighbours differ.
        left, right = 10 + index * 37 % 90, 10 + index * 53 % 89
        row = {"question": f"What is {left} + {right}?", "answer": str(left + right), "index": index}
        yield RawRow("synthetic", index + 1, row)

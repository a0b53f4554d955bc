"""Rows from files: Parquet, and Hugging Face datasets saved to disk.

Read as streams, so that no file is held in memory whole. A file that cannot be read at all is a DataError; a single
row that cannot be is left to the check of the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.data.jsonl import RawRow, files_of
from asyncrl.dataloader.rows import missing_column
from asyncrl.errors import DataError

BATCH_ROWS = 1024


def read_parquet(pattern: str, prompt_key: str) -> Iterator[RawRow]:
    """One row a record; lines count the records of a file. Raises DataError."""
    pyarrow = _import_pyarrow(pattern)
    from pyarrow import parquet

    for path in files_of(pattern):
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, prompt_key)
                yield from _rows_of(path, file.iter_batches(batch_size=BATCH_ROWS))
        except DataError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"is not a readable Parquet file: {_first_line(error)}", path=path) from None


def read_hf(folder: str, split: str, prompt_key: str) -> Iterator[RawRow]:
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
        raise DataError("no such folder", path=str(folder))
    if (folder / "state.json").is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if not splits:
        raise DataError(
            'was not written by save_to_disk; for a folder of Parquet files set source = "parquet" and a glob',
            path=str(folder),
        )
    if split not in splits:
        raise DataError(f"has no split {split!r}; it has {', '.join(splits)}", path=str(folder))
    return folder / split


def _check_columns(path: str, columns: list[str], prompt_key: str) -> None:
    if prompt_key not in columns:
        raise DataError(missing_column(prompt_key, columns), path=path)


def _rows_of(path: str, batches: Any) -> Iterator[RawRow]:
    line = 0
    for batch in batches:
        for value in batch.to_pylist():
            line += 1
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

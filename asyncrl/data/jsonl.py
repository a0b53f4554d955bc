"""Rows of JSON lines, read as a stream, so that no file is held in memory whole.

A file that cannot be read at all is a DataError; a single row that cannot be is left to the check of the rows.
"""

from __future__ import annotations

import codecs
import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import DataError


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that a source found at ``path``:``line`` (1-based), or the problem with it."""

    path: str
    line: int
    value: Any = None
    problem: str = ""


def read_jsonl(pattern: str) -> Iterator[RawRow]:
    """One row a line of a file, or of each file of a glob; blank lines are passed over. Raises DataError."""
    decode = msgspec.json.Decoder().decode
    for path in files_of(pattern):
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if not line.strip():
                        continue
                    try:
                        value = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        yield RawRow(path, number, problem=f"is not valid JSON: {error}")
                    else:
                        yield RawRow(path, number, value)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=path) from None


def files_of(pattern: str) -> list[str]:
    """The files of a path or glob, by name. Raises DataError."""
    if Path(pattern).is_file():
        return [pattern]
    if Path(pattern).is_dir():
        raise DataError("is a folder; give a file or a glob such as FOLDER/*.jsonl", path=pattern)
    found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not found:
        raise DataError("no such file", path=pattern)
    return found

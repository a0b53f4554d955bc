"""Rows of JSON lines, which are read as a stream, and of a JSON list, which is held in memory whole.

Either may be compressed by gzip: the first bytes of a file say so. A file that cannot be read raises DataError. The
check of the rows reports a single row that cannot be read.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import msgspec

from asyncrl.core.errors import DataError
from asyncrl.data.files import PARQUET_MAGIC, files_of

GZIP_MAGIC = b"\x1f\x8b"
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that a source found at ``path``:``line`` (1-based), or the problem with it.

    Lines of a JSON list and of a Parquet file count its records.
    """

    path: str
    line: int
    value: Any = None
    problem: str = ""
    typed: bool = False
    """Whether it is from a table with typed columns: a field that an object was written without is null there."""


def read_jsonl(pattern: str) -> Iterator[RawRow]:
    """The rows of a file, or of each file of a glob. Raises DataError."""
    yield from read_json_rows(files_of(pattern))


def read_json_rows(paths: Iterable[str]) -> Iterator[RawRow]:
    """One row a line, without blank lines; or one for each item of a file that is a JSON list. Raises DataError."""
    for path in paths:
        try:
            with _open(path) as file:
                yield from _lines(path, file)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", path=path) from None
        except (EOFError, zlib.error) as error:
            raise DataError(f"is damaged or not whole: {error}", path=path, fix="copy it again") from None


def _open(path: str) -> BufferedIOBase:
    """The file, uncompressed. Raises OSError, and DataError for a Parquet file."""
    with open(path, "rb") as file:
        first = file.read(4)
    if first == PARQUET_MAGIC:
        fix = 'for data.path set data.source = "parquet"; sft.data takes JSON alone, so convert the file'
        raise DataError("is a Parquet file, and is read as JSON", path=path, fix=fix)
    return gzip.open(path, "rb") if first.startswith(GZIP_MAGIC) else open(path, "rb")


def _lines(path: str, file: BufferedIOBase) -> Iterator[RawRow]:
    is_first = True
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if is_first and line.lstrip().startswith(b"["):
            yield from _items(path, line, file.read())
            return
        is_first = False
        yield _row(path, number, line)


def _items(path: str, first: bytes, rest: bytes) -> Iterator[RawRow]:
    """The items of a file that is one JSON list; its lines if only the first one is a list. Raises DataError."""
    try:
        for number, value in enumerate(_decode(first + rest), 1):
            yield RawRow(path, number, value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _row(path, 1, first).problem:
            raise DataError(f"is not a valid JSON list: {error}", path=path, fix="write it again, whole") from None
        for number, line in enumerate([first, *rest.splitlines()], 1):
            if line.strip():
                yield _row(path, number, line)


def _row(path: str, number: int, line: bytes) -> RawRow:
    try:
        return RawRow(path, number, _decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RawRow(path, number, problem=f"is not valid JSON: {error}")

"""Finds the files of a data set, reads their rows and columns, and computes the order in which prompts are drawn.

A path names a file, a glob or a folder. The kind of source that reads it follows from a file's name, or from its first
bytes if the name has no known suffix. A folder was written by ``datasets.save_to_disk``, or it holds JSON or Parquet
files, as a download from the hub does. Then the files of one split are taken. Fails with DataError if there is no file,
or if the folder holds several data sets. Nothing is downloaded here. Where a name of the Hugging Face hub comes this
far, for example as an address, the error gives the command that downloads it.

JSON lines are read as a stream; a JSON list is held in memory whole. Either may be compressed by gzip, which the first
bytes of a file show. A file that cannot be read raises DataError. A single row that cannot be read becomes a RawRow
with a ``problem``.

Columns may be nested: ``reward_model.ground_truth``. A column whose own name contains the dots has precedence.

The order is a pure function of (dataset fingerprint, size, seed, epoch). A position counts draws from 0 over all
epochs: after the last prompt of an epoch comes the first of the next. Invariant: in an epoch every index occurs exactly
once. The result depends neither on a library's random generator nor on earlier look-ups, so a restarted dataloader
continues where the lost one was. The permutation is the swap-or-not shuffle (Hoang, Morris, Rogaway, "An Enciphering
Scheme Based on a Card Shuffle", CRYPTO 2012): O(log n) time and no memory for a lookup, for any n. Each of its rounds
is its own inverse, so the same rounds in reverse order give the position of an index.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from asyncrl.core.errors import DataError
from asyncrl.core.files import FILE_SUFFIX
from asyncrl.core.formatting import name_some

if TYPE_CHECKING:
    # Imported where it is used: workers of rewards read columns, and start in half the time without it.
    import numpy as np

Kind = Literal["jsonl", "parquet", "hf"]
PARQUET_MAGIC = b"PAR1"
GZIP_MAGIC = b"\x1f\x8b"
DEPTH = 2
"""Levels of a folder that are searched for files: its own, and that of its direct subfolders."""
LISTED = 5
"""Most paths that an error names."""
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_UNREADABLE = (".csv", ".tsv", ".xlsx", ".arrow", ".feather", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
"""Files that describe a data set and hold no rows."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ADDRESS = re.compile(r"(?:hf://|https?://(?:huggingface\.co|hf\.co)/)(?:datasets/)?([^/\s]+/[^/\s?#]+)")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_decode = msgspec.json.Decoder().decode
_MISSING = object()
_MASK = (1 << 64) - 1
_MIN_ROUNDS = 32
"""Rounds that are enough for a small n too, where the bound of the paper says little."""


def find_files(pattern: str, *, kind: Kind | None = None, split: str = "train") -> tuple[Kind, list[str]]:
    """Find the files of ``pattern`` (a file, a glob or a folder), and the kind of source that reads them.

    Returns (kind, paths sorted by name); for "hf" the only path is the folder. In a folder ``split`` and a given
    ``kind`` select files; elsewhere a given ``kind`` is not checked against the files. Raises DataError.
    """
    folder = Path(pattern)
    # A folder that may not be searched is an error of ``of_split`` if its kind is given.
    if kind == "hf" or (kind is None and ((folder / "state.json").is_file() or any(folder.glob("*/state.json")))):
        return "hf", [pattern]
    if folder.is_dir():
        candidates = [file.relative_to(folder) for file in [*folder.glob("*"), *folder.glob("*/*")]]
        files = [str(folder / file) for file in of_split(str(folder), candidates, kind, split)]
    else:
        files = files_of(pattern)
    if kind is not None:
        return kind, files
    kinds = {_kind_of(file): file for file in files}
    if len(kinds) > 1:
        given = " and ".join(kinds.values())
        raise DataError(f"holds files of several kinds ({given})", path=pattern, fix="give a glob, as *.parquet")
    return next(iter(kinds)), files


def files_of(pattern: str) -> list[str]:
    """Return the files of a path or glob, sorted by name. Raises DataError."""
    if Path(pattern).is_file():
        return [pattern]
    if Path(pattern).is_dir():
        raise DataError("is a folder; give a file or a glob such as FOLDER/*.jsonl", path=pattern)
    found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not found:
        raise no_such("no such file", pattern)
    return found


def no_such(what: str, path: str) -> DataError:
    """Return the error for a missing path; for a name of the hub it gives the command that downloads it."""
    advice = fetch_advice(path, is_dataset=True)
    if not advice:
        return DataError(what, path=path)
    return DataError(f"{what}, and this looks like a name of the Hugging Face hub", path=path, fix=advice)


def _kind_of(file: str) -> Kind:
    """Choose the kind of source for a file by its suffix, or else by its first bytes. Raises DataError."""
    name = Path(file.lower().removesuffix(".gz"))
    if name.suffix in _KINDS:
        return _KINDS[name.suffix]
    if Path(file.lower()).suffix in _UNREADABLE or name.suffix in _UNREADABLE:
        fix = 'convert it, as with pandas: read_csv(...).to_json("prompts.jsonl", orient="records", lines=True)'
        raise DataError("is not a kind of file that is read: JSON lines, a JSON list, Parquet", path=file, fix=fix)
    try:
        with open(file, "rb") as opened:
            return "parquet" if opened.read(4) == PARQUET_MAGIC else "jsonl"
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=file) from None


def of_split(place: str, candidates: Sequence[PurePath], kind: Kind | None, split: str) -> list[PurePath]:
    """Choose the files of one split from those of a folder or a repository, given relative to ``place``. Pure.

    Only files in the folder itself and in its direct subfolders count. If no file is named like any split, all of them
    are chosen. Raises DataError without a file, for a missing split, and if the files lie in several folders.
    """
    files = [file for file in sorted(candidates) if len(file.parts) <= DEPTH and _holds_rows(file, kind)]
    if not files:
        suffixes = ", ".join(suffix for suffix, of in _KINDS.items() if kind in (None, of))
        raise DataError(f"is a folder without a file of rows ({suffixes})", path=place, fix="give a file or a glob")
    chosen = [file for file in files if _is_of_split(file, split)]
    if not chosen:
        if any(_is_of_split(file, other) for file in files for other in _SPLITS):
            raise DataError(
                f"has no file of the split {split!r}; it has {_listed(files)}",
                path=place,
                fix="set data.split, or give a file or a glob",
            )
        chosen = files
    parents = list(dict.fromkeys(file.parent for file in chosen))
    if len(parents) > 1:
        raise DataError(
            f"holds several data sets: {_listed(parents)}",
            path=place,
            fix=f"give one of them, as {PurePath(place) / parents[0]}",
        )
    return chosen


def _holds_rows(file: PurePath, kind: Kind | None) -> bool:
    """Whether a file, by its name, can hold rows of this kind, or of any kind if None.

    ``file`` is relative to the data set's folder.
    """
    found = _KINDS.get(Path(file.name.lower().removesuffix(".gz")).suffix)
    is_hidden = any(part.startswith(".") for part in file.parts)
    return found is not None and kind in (None, found) and not is_hidden and file.name not in _DESCRIPTIONS


def _is_of_split(file: PurePath, split: str) -> bool:
    """Whether the name of the split is a word of the file's path."""
    return re.search(rf"(^|[-_./ ]){re.escape(split)}([-_./ ]|$)", file.as_posix(), re.IGNORECASE) is not None


def _listed(paths: Sequence[PurePath]) -> str:
    return name_some([str(path) for path in paths], LISTED)


def download_command(name: str, revision: str = "", *, is_dataset: bool = False) -> str:
    """Return the command that downloads the hub's repository ``name``, OWNER/NAME, to a folder NAME."""
    kind = "--repo-type dataset " if is_dataset else ""
    at = f"--revision {shlex.quote(revision)} " if revision else ""
    return f"hf download {kind}{at}{shlex.quote(name)} --local-dir {shlex.quote(name.rpartition('/')[2])}"


def fetch_advice(path: str, key: str = "the path", *, is_dataset: bool = False) -> str:
    """Return the advice to download the hub's repository ``path`` and to set ``key`` to the folder.

    Empty if ``path`` does not look like a name of the hub: OWNER/NAME, or the address of its page. A path that exists,
    or whose first folder exists, is no name.
    """
    if address := _HUB_ADDRESS.match(path):
        name = address[1]
    elif _HUB_NAME.fullmatch(path) and not FILE_SUFFIX.search(path) and not Path(path).parent.exists():
        name = path
    else:
        return ""
    command = download_command(name, is_dataset=is_dataset)
    return f"run `{command}` and set {key} to {command.rpartition(' ')[2]}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that a source has read at ``path``:``line``, or the problem with it.

    ``line`` counts from 1; in a JSON list or a Parquet file it counts records.
    """

    path: str
    line: int
    value: Any = None
    problem: str = ""


def read_jsonl(pattern: str) -> Iterator[RawRow]:
    """Yield the rows of a file, or of each file of a glob. Raises DataError."""
    yield from read_json_rows(files_of(pattern))


def read_json_rows(paths: Iterable[str]) -> Iterator[RawRow]:
    """Read JSON files: one row for each line that is not blank, or for each item of a JSON list. Raises DataError."""
    for path in paths:
        try:
            with _open(path) as file:
                yield from _lines(path, file)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", path=path) from None
        except (EOFError, zlib.error) as error:
            raise DataError(f"is damaged or not whole: {error}", path=path, fix="copy it again") from None


class GrowingFile:
    """A file of JSON lines to which rows are appended while it is read.

    A line counts once it is whole, so a writer may be in the middle of the last one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_bytes, self._read_lines = 0, 0

    def read(self) -> list[RawRow]:
        """Read the whole lines since the last call. Raises DataError, also for a file that has become shorter."""
        path = self._path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._read_bytes:
                    fix = "append rows only; to change others, resume the run with --allow-changed-data"
                    raise DataError("has become shorter while the run follows it", path=path, fix=fix)
                first = file.read(4)
                if first.startswith(GZIP_MAGIC) or first == PARQUET_MAGIC or first.lstrip().startswith(b"["):
                    fix = "take a plain file with an object on each line, or leave follow out"
                    raise DataError("cannot be followed", path=path, fix=fix)
                file.seek(self._read_bytes)
                data = file.read(size - self._read_bytes)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", path=path) from None
        data = data[: data.rfind(b"\n") + 1]
        rows = []
        for number, line in enumerate(data.split(b"\n")[:-1], self._read_lines + 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                rows.append(_row(path, number, line))
        self._read_bytes += len(data)
        self._read_lines += data.count(b"\n")
        return rows


def _open(path: str) -> BufferedIOBase:
    """Open a file for reading, through gzip if it is compressed. Raises OSError, and DataError for a Parquet file."""
    with open(path, "rb") as file:
        first = file.read(4)
    if first == PARQUET_MAGIC:
        fix = 'for data.path set data.source = "parquet"; sft.data takes JSON alone, so convert the file'
        raise DataError("is a Parquet file, and is read as JSON", path=path, fix=fix)
    return gzip.open(path, "rb") if first.startswith(GZIP_MAGIC) else open(path, "rb")


def _lines(path: str, file: BufferedIOBase) -> Iterator[RawRow]:
    """Yield the rows of an open file. If its first line with text begins with "[", the file may be a JSON list."""
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
    """Yield the rows of a file that begins with "[": either one JSON list, or JSON lines whose first line is a list.

    ``first`` is the first line, ``rest`` the bytes after it. Raises DataError if the file is neither.
    """
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
    """Decode one line; invalid JSON becomes the row's problem."""
    try:
        return RawRow(path, number, _decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RawRow(path, number, problem=f"is not valid JSON: {error}")


def column_of(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of column ``key``, or ``default`` without it. A dotted key names a field inside an object."""
    found = _find(row, key)
    return default if found is _MISSING else found


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Whether the row has the column ``key``; its value may be None."""
    return _find(row, key) is not _MISSING


def column_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns in the order of the row, those inside objects as dotted names."""
    return list(_names(row, ""))


def _find(row: Mapping[str, Any], key: str) -> Any:
    """Find the value of a column; _MISSING if the row has none.

    Tries the whole key as a name first. Then it splits the key at each dot, and searches the object before the dot.
    """
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


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of ``size`` prompts in every epoch. Without ``shuffle`` this is the order of the data."""

    fingerprint: str
    seed: int
    size: int
    shuffle: bool = True

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch, index) of the prompt at ``position``, which counts from 0 over all epochs."""
        assert position >= 0
        assert self.size > 0
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return epoch, offset
        return epoch, self._swap_or_not(offset, self._rounds(epoch))

    def position(self, epoch: int, index: int) -> int:
        """Return the position of a prompt, counted from 0 over all epochs: the inverse of ``at``."""
        assert 0 <= index < self.size
        offset = self._swap_or_not(index, reversed(self._rounds(epoch))) if self.shuffle else index
        return epoch * self.size + offset

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the prompt indices at offsets ``start`` to ``stop`` of an epoch: int64 [N].

        N is ``stop - start``, or less at the end of the epoch. Far cheaper than calls of ``at``.
        """
        import numpy as np

        index = np.arange(start, min(stop, self.size), dtype=np.int64)
        if not self.shuffle:
            return index
        for pivot, key in self._rounds(epoch):
            partner = pivot - index
            # Equals (pivot - index) % size, since both lie in [0, size).
            partner += (partner < 0) * self.size
            index = np.where(_coins(key, np.maximum(index, partner)), partner, index)
        return index

    def _rounds(self, epoch: int) -> tuple[tuple[int, int], ...]:
        return _rounds(self.fingerprint, self.seed, epoch, self.size)

    def _swap_or_not(self, index: int, rounds: Iterable[tuple[int, int]]) -> int:
        """Permute an index. By a pseudorandom bit, each round swaps the index with its partner or keeps it."""
        for pivot, key in rounds:
            partner = (pivot - index) % self.size
            # Index and partner share one coin, so that a round swaps both of them or keeps both.
            if _coin(key, max(index, partner)):
                index = partner
        return index


@lru_cache(maxsize=8)
def _rounds(fingerprint: str, seed: int, epoch: int, size: int) -> tuple[tuple[int, int], ...]:
    """Derive (pivot, key) of each round of the shuffle from the fingerprint of the data, the seed and the epoch."""
    rounds = []
    for number in range(_MIN_ROUNDS + 4 * size.bit_length()):
        # 16 bytes for the pivot, 8 for the key.
        digest = hashlib.blake2b(f"{fingerprint}/{seed}/{epoch}/{number}".encode(), digest_size=24).digest()
        rounds.append((int.from_bytes(digest[:16], "big") % size, int.from_bytes(digest[16:], "big")))
    return tuple(rounds)


def _coin(key: int, value: int) -> int:
    """Return a pseudorandom bit: the highest one of SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    mixed = (value ^ key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed >> 63


def _coins(key: int, values: np.ndarray) -> np.ndarray:
    """Apply ``_coin`` to each value: int64 [N] to bool [N]."""
    import numpy as np

    mixed = values.astype(np.uint64) ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(63)).astype(bool)

"""Finds the files of a data set that a path names, and the kind of source that reads them.

The kind follows from a file's name, or from its first bytes if the name has no known suffix. A folder was written by
``datasets.save_to_disk``, or it holds JSON or Parquet files, as a download from the hub does. Then the files of one
split are taken. Fails with DataError if there is no file, or if the folder holds several data sets.

Nothing is downloaded here. Where a name of the Hugging Face hub comes this far, for example as an address, the error
gives the command that downloads it.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Literal

from asyncrl.core.errors import DataError
from asyncrl.core.files import FILE_SUFFIX
from asyncrl.core.printable import name_some

Kind = Literal["jsonl", "parquet", "hf"]
PARQUET_MAGIC = b"PAR1"
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


def find_files(pattern: str, *, kind: Kind | None = None, split: str = "train") -> tuple[Kind, list[str]]:
    """Find the files of ``pattern`` (a file, a glob or a folder), and the kind of source that reads them.

    Returns (kind, paths sorted by name); for "hf" the only path is the folder. A given ``kind`` is not checked against
    the files. ``split`` selects files in a folder. Raises DataError.
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

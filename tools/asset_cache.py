"""A cache of folders of assets. Each is made once for its hash and kept until a user deletes the cache.

Invariant: a folder whose name has a hash is complete. It is written under another name and then renamed. A maker that
is killed leaves only a partial folder, which the next maker removes. A lock separates two makers.

Raises TimeoutError if another process holds the lock for too long, and the errors of the maker.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

LIBRARIES = ("tokenizers", "torch", "transformers")
LOCK_TIMEOUT_S = 300.0
PART = "part-"


@dataclass(frozen=True, slots=True)
class Assets:
    """The folder of a model and the rows of a task."""

    folder: Path

    @property
    def model(self) -> Path:
        """A Hugging Face model folder."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        """JSONL with the column prompt and what the task needs."""
        return self.folder / "train.jsonl"

    @property
    def heldout(self) -> Path:
        """JSONL as of train; no row is in both."""
        return self.folder / "heldout.jsonl"

    def write(self, train: Iterable[Mapping[str, Any]], heldout: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows."""
        for path, rows in ((self.train, train), (self.heldout, heldout)):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def content_hash(settings: dict[str, Any], code: Path) -> str:
    """Return 16 hex digits over settings, the modules of ``code``, small_model.py and the versions of the libraries."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for library in LIBRARIES:
        digest.update(f"{library}=={version(library)}\n".encode())
    for module in (Path(__file__).with_name("small_model.py"), *sorted(code.glob("*.py"))):
        digest.update(module.name.encode() + b"\0" + module.read_bytes())
    return digest.hexdigest()[:16]


def ensure_folder(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder ``name`` in ``cache``. ``make`` fills it if it is missing."""
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock", timeout=LOCK_TIMEOUT_S):
        for left_over in cache.glob(f"{PART}*"):
            shutil.rmtree(left_over)
        if not folder.is_dir():
            part = Path(tempfile.mkdtemp(prefix=PART, dir=cache))
            make(part)
            part.rename(folder)
    return folder

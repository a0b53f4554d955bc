"""A cache of folders of assets, each a model and the rows of a task, and the start of a run on them.

A folder is made once for its hash and kept until a user deletes the cache.

Invariant: a folder whose name has a hash is complete. It is written under another name and then renamed. A maker that
is killed leaves only a partial folder, which the next maker removes. A lock separates two makers.

Raises TimeoutError if another process holds the lock for too long, and the errors of the maker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"
LIBRARIES = ("tokenizers", "torch", "transformers")
LOCK_TIMEOUT_S = 300.0
PART = "part-"


@dataclass(frozen=True)
class ModelSettings:
    """Settings of data, model and warm-up that every task has."""

    seed: int = 0
    """Seed of rows, initial weights and demonstrations."""
    heldout: int = 256
    """Rows that neither the warm-up nor reinforcement learning sees."""
    train: int = 1024
    """Rows of reinforcement learning."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    """Width / heads must be a head dimension that vLLM's CPU attention knows: 32, 64, ..."""
    intermediate: int = 512
    positions: int = 512

    batch: int = 32
    """New demonstrations of each step of the warm-up."""
    lr: float = 1e-3
    """Peak learning rate of AdamW, after a linear rise over ``rise`` steps."""
    rise: int = 20


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

    def keys(self, *evals: str) -> dict[str, str]:
        """Configuration keys of a run with these evaluation sets."""
        heldout = {f"eval.{name}.data.path": str(self.heldout) for name in evals}
        return {"model.path": str(self.model), "data.path": str(self.train), **heldout}

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


def parser_of(tool: str, own: str = "") -> argparse.ArgumentParser:
    """A parser that leaves the arguments of asyncrl-launch."""
    return argparse.ArgumentParser(
        prog=f"python -m tools.{tool}",
        usage=f"%(prog)s {own}[--KEY VALUE ...]",
        description="Make a model and its tasks if they are not cached, then launch the run.",
        epilog="Everything else goes to asyncrl-launch: --run.seed 1, --learner.lr 0, --dry-run, ...",
        allow_abbrev=False,
    )


def launch_command(name: str, assets: Assets, evals: Sequence[str], further: Sequence[str]) -> list[str]:
    """The launcher's command line for configs/NAME.toml. ``further`` arguments win."""
    flags = [part for key, value in assets.keys(*evals).items() for part in (f"--{key}", value)]
    return [sys.executable, "-m", "asyncrl.cli.launch", str(ROOT / "configs" / f"{name}.toml"), *flags, *further]


def launch(name: str, make: Callable[[], Assets], evals: Sequence[str], further: Sequence[str]) -> int:
    """Replace this process by the launcher. Returns only if the assets cannot be made."""
    print(f"{name}: model and data in {CACHE}", flush=True)
    try:
        command = launch_command(name, make(), evals, further)
    except KeyboardInterrupt:
        return 130
    except (OSError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    os.execv(command[0], command)

"""The quickstart's assets in their cache: made once for each content hash, kept until somebody deletes them.

CACHE/HASH/ holds model/, train.jsonl, heldout.jsonl and settings.json. Invariant: a folder that bears a hash is
complete. It is written beside its place and renamed, so a maker that is killed leaves only a part folder, which the
next one removes; a lock keeps two makers apart.

Fails with TimeoutError when another process holds the lock for too long, RuntimeError when the warm-up finds no
signal.
"""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from tools.quickstart.settings import Settings, content_hash
from tools.quickstart.task import Problem, draw_problems

LOCK_TIMEOUT_S = 300.0
LOCK_POLL_S = 0.2
PART = "part-"


@dataclass(frozen=True, slots=True)
class Assets:
    """Where the assets of one hash are."""

    folder: Path

    @property
    def model(self) -> Path:
        """A Hugging Face model folder."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        """JSONL with the columns prompt and answer."""
        return self.folder / "train.jsonl"

    @property
    def heldout(self) -> Path:
        """As train; no sum is in both."""
        return self.folder / "heldout.jsonl"


@dataclass(frozen=True, slots=True)
class Splits:
    """Problems drawn from one stream, so that no sum is in two of them."""

    heldout: list[Problem]
    train: list[Problem]
    demonstrated: Iterator[Problem]
    """Endless."""


def draw_splits(settings: Settings) -> Splits:
    """The problems of ``settings``."""
    stream = draw_problems(random.Random(settings.seed), settings.digits)
    heldout = list(islice(stream, settings.heldout))
    train = list(islice(stream, settings.train))
    return Splits(heldout, train, stream)


def ensure_assets(settings: Settings, cache: Path, make: Callable[[Settings, Path], None] | None = None) -> Assets:
    """The assets of ``settings`` in ``cache``, made by ``make`` if they are not there yet."""
    assets = Assets(cache / content_hash(settings))
    if assets.folder.is_dir():
        return assets
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        for left_over in cache.glob(f"{PART}*"):
            shutil.rmtree(left_over)
        if not assets.folder.is_dir():
            part = Path(tempfile.mkdtemp(prefix=PART, dir=cache))
            (make or make_assets)(settings, part)
            part.rename(assets.folder)
    return assets


def make_assets(settings: Settings, folder: Path) -> None:
    """Make the assets in an empty folder."""
    import torch

    from tools.quickstart.model import make_model, make_tokenizer, save
    from tools.quickstart.warmup import warm_up

    # Matrices this small gain little from a second thread, and lose a lot where the cores are busy.
    torch.set_num_threads(1)
    assets = Assets(folder)
    splits = draw_splits(settings)
    _write_jsonl(assets.train, splits.train)
    _write_jsonl(assets.heldout, splits.heldout)
    tokenizer, model = make_tokenizer(), make_model(settings)
    print(
        f"  a model of {model.num_parameters():,} parameters, {settings.train:,} problems to train on, "
        f"{settings.heldout} held out",
        flush=True,
    )
    warm_up(model, tokenizer, settings, splits.demonstrated, splits.train[: settings.probes])
    save(model, tokenizer, assets.model)
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


def _write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    rows = ({"prompt": problem.prompt, "answer": problem.answer} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system releases however this process ends."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"quickstart waited {LOCK_TIMEOUT_S:.0f} s for {path}, held by another process that makes "
                        "the same assets; wait for it or end it"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield

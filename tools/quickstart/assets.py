"""The quickstart's assets in their cache (tools/asset_cache.py), and how they are made.

CACHE/HASH/ holds model/, train.jsonl, heldout.jsonl and settings.json.

Fails with TimeoutError when another process holds the cache for too long, RuntimeError when the warm-up finds no
signal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from tools.asset_cache import CACHE, Assets, ensure_folder
from tools.quickstart.settings import SETTINGS, Settings, content_hash
from tools.quickstart.task import Problem, draw_problems

EVALS = ("heldout", "heldout_greedy")
"""Evaluation sets of configs/quickstart.toml."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Problems drawn from one stream, so that no sum is in two of them."""

    heldout: list[Problem]
    train: list[Problem]
    demonstrated: Iterator[Problem]
    """Problems to demonstrate, without end."""


def draw_splits(settings: Settings) -> Splits:
    """The problems of ``settings``."""
    stream = draw_problems(random.Random(settings.seed), settings.digits)
    heldout = list(islice(stream, settings.heldout))
    train = list(islice(stream, settings.train))
    return Splits(heldout, train, stream)


def make_assets(settings: Settings, folder: Path) -> None:
    """Make the assets in an empty folder."""
    import torch

    from tools.quickstart.model import make_model, make_tokenizer, save, warm_up

    # Matrices this small gain little from a second thread, and lose a lot where the cores are busy.
    torch.set_num_threads(1)
    assets = Assets(folder)
    splits = draw_splits(settings)
    train, heldout = (
        [{"prompt": each.prompt, "answer": each.answer} for each in problems]
        for problems in (splits.train, splits.heldout)
    )
    assets.write(train, heldout)
    tokenizer, model = make_tokenizer(settings.characters), make_model(settings)
    print(
        f"  a model of {model.num_parameters():,} parameters, {settings.train:,} problems to train on, "
        f"{settings.heldout} held out",
        flush=True,
    )
    warm_up(model, tokenizer, settings, splits.demonstrated, splits.train[: settings.probes])
    save(model, tokenizer, assets.model)
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


def ensure_assets(
    settings: Settings = SETTINGS,
    cache: Path = CACHE / "quickstart",
    make: Callable[[Settings, Path], None] = make_assets,
) -> Assets:
    """The assets of ``settings`` in ``cache``, made by ``make`` if they are not there yet."""
    return Assets(ensure_folder(cache, content_hash(settings), lambda folder: make(settings, folder)))

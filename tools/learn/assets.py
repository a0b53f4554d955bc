"""A recipe's model and data in their cache.

CACHE/HASH/ holds model/, train.jsonl and heldout.jsonl.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from tools.asset_cache import CACHE, Assets, content_hash, ensure_folder
from tools.learn.recipe import Recipe, Row


def draw_rows(recipe: Recipe) -> tuple[list[Row], list[Row]]:
    """Rows held out, and rows to train on."""
    stream = recipe.rows(random.Random(recipe.settings.seed))
    return list(islice(stream, recipe.settings.heldout)), list(islice(stream, recipe.settings.train))


def ensure_assets(recipe: Recipe, cache: Path = CACHE / "learn") -> Assets:
    """The assets of a recipe, made if they are not there yet."""
    described = asdict(recipe.settings) | {"recipe": recipe.name}
    name = content_hash(described, Path(__file__).parent)
    return Assets(ensure_folder(cache, name, lambda folder: _make(recipe, Assets(folder))))


def _make(recipe: Recipe, assets: Assets) -> None:
    heldout, train = draw_rows(recipe)
    assets.write(train, heldout)
    if recipe.pretrained is not None:
        assets.model.symlink_to(recipe.pretrained())
    else:
        _warm_up(recipe, assets, train)
    print(f"  {len(train)} rows to train on, {len(heldout)} held out")


def _warm_up(recipe: Recipe, assets: Assets, train: list[Row]) -> None:
    import torch

    from tools.learn.chat_model import make_model, make_tokenizer, save
    from tools.learn.warmup import warm_up

    # Matrices this small gain little from a second thread, and lose a lot where the cores are busy.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(recipe.settings, len(tokenizer))
    print(f"  a model of {model.num_parameters():,} parameters")
    warm_up(model, tokenizer, recipe, train)
    save(model, tokenizer, assets.model)

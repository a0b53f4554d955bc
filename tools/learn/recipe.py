"""A recipe: its task, its model or the demonstrations for one, and how they are made in their cache.

CACHE/HASH/ holds model/, train.jsonl and heldout.jsonl.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tools.asset_cache import CACHE, Assets, ModelSettings, content_hash, ensure_folder

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Settings(ModelSettings):
    """Settings of data, model and warm-up."""

    steps: int = 400
    """Steps of the warm-up."""

    @property
    def kv_heads(self) -> int:
        """As many as heads."""
        return self.heads


@dataclass(frozen=True)
class Recipe:
    """One task."""

    name: str
    """Name of the task and of its configuration: configs/NAME.toml."""
    rows: Callable[[random.Random], Iterator[Row]]
    """Distinct rows with the column ``prompt``, as many as there are."""
    demonstrate: Callable[[Row, random.Random], Sequence[Message]] | None = None
    """A conversation about a row, by a teacher who shows the form and is often wrong, to warm a new model up on."""
    pretrained: Callable[[], Path] | None = None
    """The folder of a model to begin with, in the place of a new one."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as in the requests of the episode."""
    settings: Settings = field(default_factory=Settings)


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

    from tools.learn.chat_model import make_model, make_tokenizer, save, warm_up

    # Matrices this small gain little from a second thread, and lose a lot where the cores are busy.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(recipe.settings, len(tokenizer))
    print(f"  a model of {model.num_parameters():,} parameters")
    warm_up(model, tokenizer, recipe, train)
    save(model, tokenizer, assets.model)

"""A recipe: its task, its model or the demonstrations for one, and everything else that determines them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.asset_cache import ModelSettings

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

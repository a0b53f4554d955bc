"""A recipe: its task, its model or the demonstrations for one, and everything else that determines them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of data, model and warm-up."""

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

    steps: int = 400
    """Steps of the warm-up."""
    batch: int = 32
    """New demonstrations of each step."""
    lr: float = 1e-3
    """Peak learning rate of AdamW, after a linear rise over ``rise`` steps."""
    rise: int = 20

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

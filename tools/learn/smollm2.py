"""A real chat model learns to add: SmolLM2-135M-Instruct on sums of two digits, asked in its own chat template.

It is fetched as it is (tools/smollm2.py): no warm-up, no format to be learnt first. At the start it says a sum in a
sentence, and mostly a wrong one; the last number of its answer counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tools.asset_cache import ensure_folder
from tools.learn.recipe import Recipe, Row, Settings
from tools.smollm2 import CACHE, make

DIGITS = range(1, 10)


def rows(source: random.Random) -> Iterator[Row]:
    """Every sum of two digits."""
    every = [(a, b) for a in DIGITS for b in DIGITS]
    source.shuffle(every)
    for a, b in every:
        yield {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


def fetched() -> Path:
    """The folder of the model."""
    return ensure_folder(CACHE, "smollm2-135m-instruct", make)


RECIPE = Recipe(name="smollm2-135m", rows=rows, pretrained=fetched, settings=Settings(heldout=27, train=54))

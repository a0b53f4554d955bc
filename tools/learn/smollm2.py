"""A real chat model learns to add: SmolLM2-135M-Instruct on sums of two digits, asked in its own chat template.

It is fetched as it is (tools/smollm2.py): no warm-up, no format to be learnt first. At the start it says a sum in a
sentence, and mostly a wrong one; the last number of its answer counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.learn.recipe import Recipe, Row, Settings
from tools.smollm2 import fetch

DIGITS = range(1, 10)


def rows(source: random.Random) -> Iterator[Row]:
    """Every sum of two digits."""
    every = [(a, b) for a in DIGITS for b in DIGITS]
    source.shuffle(every)
    for a, b in every:
        yield {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


RECIPE = Recipe(name="smollm2-135m", rows=rows, pretrained=fetch, settings=Settings(heldout=27, train=54))

"""The truncation of the sampling distribution, by top-k, top-p and min-p.

Each token is then sampled from a *set* of tokens, in proportion to their probabilities. The engine returns the set
(messages/token_sets.py), and the learner divides probabilities by those of the whole set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

LARGEST_SET = 1024
"""Largest top_k. It bounds the size of the sets; a set is larger only if probabilities are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Cuts of the distribution after temperature: min-p, then top-k, then top-p, each of what is left."""

    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Take the likeliest tokens whose probabilities add up to this; 1 takes all."""
    top_k: Annotated[int, Meta(ge=1, le=LARGEST_SET)] = LARGEST_SET
    """Take this number of the likeliest tokens."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Take the tokens at least this times as likely as the likeliest one; 0 takes all."""

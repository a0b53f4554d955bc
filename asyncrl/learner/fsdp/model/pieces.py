"""Keys that each piece of a row attends to, and the positions of its tokens: from lengths and prefixes alone. Pure.

Invariant: a token sees the tokens of its own sequence that come before it, at the positions that they have there.

Fails with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a row of T tokens, in the order of its pieces (micro_batch.py)."""

    lengths: tuple[int, ...]
    """Length of each piece; sums to T."""
    key_lengths: tuple[int, ...]
    """Tokens that each attends to: the piece before it and itself; sums to K."""
    positions: np.ndarray
    """Position of each token, from 0 in each sequence: int64 [T]."""
    key_index: np.ndarray | None
    """Places in the row of the tokens that the pieces attend to: int64 [K]; None where it is the row as it stands."""


def connect(lengths: Sequence[int] | np.ndarray, prefixes: Sequence[int] | np.ndarray | None = None) -> Pieces:
    """Pieces of these lengths; ``prefixes`` as in MicroBatch, None where each piece is a whole sequence."""
    own = np.asarray(lengths, np.int64)
    before = np.full(len(own), -1) if prefixes is None else np.asarray(prefixes)
    starts = np.cumsum(own) - own
    # -1 fetches the last length, which ``where`` leaves out.
    skipped = np.where(before >= 0, own[before], 0)
    index: np.ndarray | None = None
    if (before >= 0).any():
        seen = [at for pair in zip(before.tolist(), range(len(own)), strict=True) for at in pair if at >= 0]
        index = np.concatenate([np.arange(starts[at], starts[at] + own[at]) for at in seen])
    return Pieces(
        lengths=tuple(own.tolist()),
        key_lengths=tuple((own + skipped).tolist()),
        positions=np.arange(own.sum()) - np.repeat(starts - skipped, own),
        key_index=index,
    )

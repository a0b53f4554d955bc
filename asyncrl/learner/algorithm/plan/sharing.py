"""Sequences of a step that begin alike, so that their beginning can be computed once. Pure.

The samples of a group have their prompt in common, and all that they go on with alike. Sequences of a group behind the
same prompt are a family; its prefix is the longest beginning that all of them have. A causal model computes the same
for it in each, so it does not matter whether tokens of it are trained.

Invariant: a sequence is in one family, and begins with the prefix of it.

Fails with nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Families of the sequences of an update, by their index."""

    family: np.ndarray
    """Family of each sequence, counted from 0: int64 [n]."""
    prefix: np.ndarray
    """Tokens with which all of the sequence's family begin: int64 [n]; 0 where the family has no other sequence."""

    def among(self, chosen: Sequence[int]) -> SharedPrompts:
        """Families of these sequences alone, in this order."""
        indices = np.asarray(chosen, np.int64)
        return SharedPrompts(self.family[indices], self.prefix[indices])


def nothing_shared(count: int) -> SharedPrompts:
    """A family of its own for each of ``count`` sequences."""
    return SharedPrompts(np.arange(count), np.zeros(count, np.int64))


def find_sharing(sequences: Sequence[np.ndarray], keys: Sequence[Hashable]) -> SharedPrompts:
    """Families of sequences, given by their token ids: those of equal ``keys`` are one."""
    families: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        families.setdefault(key, []).append(i)
    found = nothing_shared(len(sequences))
    for number, members in enumerate(families.values()):
        found.family[members] = number
        found.prefix[members] = _common([sequences[i] for i in members]) if len(members) > 1 else 0
    return found


def _common(sequences: Sequence[np.ndarray]) -> int:
    """Length of the longest common prefix."""
    shortest = min(map(len, sequences))
    stacked = np.stack([sequence[:shortest] for sequence in sequences])
    different = (stacked != stacked[0]).any(axis=0)
    return int(different.argmax()) if different.any() else shortest

"""The order of prompts: a pure function of (dataset fingerprint, seed, epoch).

Position 0, 1, 2, … runs through epoch 0, then epoch 1, and so on without a seam. Invariant: within an epoch every
index occurs exactly once, and the result depends on nothing else, neither on a library's random generator nor on
earlier look-ups, so that a restarted dataloader continues where the lost one was.

The permutation is the swap-or-not shuffle (Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle",
CRYPTO 2012): O(log n) time and no memory for a lookup, for any n. Each of its rounds is its own inverse, so that the
position of an index is found by the same rounds backwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_MIN_ROUNDS = 32
"""Rounds that are enough for a small n too, where the bound of the paper says little."""


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of ``size`` prompts in every epoch; as they stand without ``shuffle``."""

    fingerprint: str
    seed: int
    size: int
    shuffle: bool = True

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, index) of the prompt at ``position``, counted from 0 over all epochs."""
        assert position >= 0 < self.size
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return epoch, offset
        return epoch, self._swap_or_not(offset, self._rounds(epoch))

    def position(self, epoch: int, index: int) -> int:
        """Position at which ``at`` gives this prompt."""
        assert 0 <= index < self.size
        offset = self._swap_or_not(index, reversed(self._rounds(epoch))) if self.shuffle else index
        return epoch * self.size + offset

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Indices at these offsets of an epoch, int64 [stop - start], for a small part of the cost of ``at``."""
        index = np.arange(start, min(stop, self.size), dtype=np.int64)
        if not self.shuffle:
            return index
        for pivot, key in self._rounds(epoch):
            partner = pivot - index
            # This is the remainder, since pivot and index lie in [0, size).
            partner += (partner < 0) * self.size
            index = np.where(_coins(key, np.maximum(index, partner)), partner, index)
        return index

    def _rounds(self, epoch: int) -> tuple[tuple[int, int], ...]:
        return _rounds(self.fingerprint, self.seed, epoch, self.size)

    def _swap_or_not(self, index: int, rounds: Iterable[tuple[int, int]]) -> int:
        for pivot, key in rounds:
            partner = (pivot - index) % self.size
            # Both of a pair have one coin, so that either both are swapped or none.
            if _coin(key, max(index, partner)):
                index = partner
        return index


@lru_cache(maxsize=8)
def _rounds(fingerprint: str, seed: int, epoch: int, size: int) -> tuple[tuple[int, int], ...]:
    """(pivot, key) of each round."""
    found = []
    for number in range(_MIN_ROUNDS + 4 * size.bit_length()):
        digest = hashlib.blake2b(f"{fingerprint}/{seed}/{epoch}/{number}".encode(), digest_size=24).digest()
        found.append((int.from_bytes(digest[:16], "big") % size, int.from_bytes(digest[16:], "big")))
    return tuple(found)


def _coin(key: int, value: int) -> int:
    """A bit of the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mixed = (value ^ key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed >> 63


def _coins(key: int, values: np.ndarray) -> np.ndarray:
    """``_coin`` of each: int64 [N] to bool [N]."""
    mixed = values.astype(np.uint64) ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(63)).astype(bool)

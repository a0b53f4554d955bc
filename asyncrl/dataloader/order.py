"""The order of prompts: a pure function of (dataset fingerprint, seed, epoch).

Position 0, 1, 2, … runs through epoch 0, then epoch 1, and so on without a seam. Invariant: within an epoch every
index occurs exactly once, and the result depends on nothing else, neither on a library's random generator nor on
what was looked up before, so that a restarted dataloader continues where the lost one was.

The permutation is the swap-or-not shuffle (Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle",
CRYPTO 2012): O(log n) time and no memory for a lookup, for any n.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

_MASK = (1 << 64) - 1
_MIN_ROUNDS = 32
"""Enough for a small n too, where the bound of the paper says little."""


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
        index = offset
        for pivot, key in _rounds(self.fingerprint, self.seed, epoch, self.size):
            partner = (pivot - index) % self.size
            if _coin(key, max(index, partner)):
                index = partner
        return epoch, index


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

"""The noise of sampling: a pure function of (seed, position), so that nothing that happens elsewhere can change it."""

from __future__ import annotations

import hashlib

_BITS = 52


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` of a sequence, prompt included."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)


def seed_of(run_seed: int, engine: str, request: str) -> int:
    """Seed of a request that brings none of its own; 64 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{engine}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

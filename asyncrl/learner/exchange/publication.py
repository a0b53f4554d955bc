"""A published version of the weights, as the process that made it holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.messages.weights import Bucket, Manifest

OnSealed = Callable[[Bucket, int], None]
"""Function that is told of each bucket, in order, with the descriptor of its segment, as soon as it is sealed. It runs
on the thread that assembles: it must neither wait nor raise, and duplicates the descriptor to keep it."""


@dataclass
class Publication:
    """A published version: owns the file descriptors of its buckets until ``release``."""

    manifest: Manifest
    gather_s: float
    """Seconds from the start until everything was gathered and sealed."""
    fds: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.manifest.buckets)

    def release(self) -> None:
        """Close the segments; processes that opened them keep them. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def fill_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive units put together into buckets of at most ``limit`` bytes; a larger unit is a bucket of
    its own.
    """
    buckets: list[range] = []
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            buckets.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets

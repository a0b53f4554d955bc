"""Layout of a bucket in a packed NCCL broadcast: its tensors back to back, without the padding between them. Pure.

vLLM's packed consumer takes that apart again, in the order of the bucket's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.messages.weights import BucketLayout
from asyncrl.weights.segments import ITEM_BYTES, size_of


@dataclass(frozen=True, slots=True)
class Run:
    """``size`` bytes at ``source`` in the bucket that go to ``target`` in the packed buffer."""

    source: int
    target: int
    size: int


def packed_bytes(layout: BucketLayout) -> int:
    """Bytes of the packed bucket."""
    return sum(size_of(spec) for spec in layout.tensors)


def runs(layout: BucketLayout) -> list[Run]:
    """The copies that pack a bucket, as few as possible.

    Raises ValueError where a tensor would not be aligned to its items: vLLM could not take it out again.
    """
    found: list[Run] = []
    target = 0
    for spec in layout.tensors:
        size = size_of(spec)
        if target % ITEM_BYTES[spec.dtype]:
            raise ValueError(
                f"{spec.name} ({spec.dtype}) would lie at byte {target} of a packed bucket: dtypes cannot be mixed so"
            )
        last = found[-1] if found else None
        if last is not None and last.source + last.size == spec.offset:
            found[-1] = Run(last.source, last.target, last.size + size)
        elif size:
            found.append(Run(spec.offset, target, size))
        target += size
    return found

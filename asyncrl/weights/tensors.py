"""Makes torch tensors from the bytes of a version: views, which keep their bucket in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from asyncrl.messages.weights import Manifest, TensorSpec
from asyncrl.weights.held_version import size_of


def tensors_of(
    manifest: Manifest, elsewhere: Callable[[Manifest, int], torch.Tensor | None] = lambda manifest, index: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a version whose paths this process can open. Raises OSError.

    ``elsewhere`` may have the bytes of a bucket in other memory: uint8 [size]. If it returns None, they are mapped.
    """
    for index, bucket in enumerate(manifest.buckets):
        memory = elsewhere(manifest, index)
        if memory is None:
            descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = mapped(descriptor, bucket.size)
            finally:
                os.close(descriptor)
        yield from tensors_in(memory, bucket.tensors)
        # Otherwise the bytes of this bucket would stay while the next bucket is read.
        del memory


def tensors_in(memory: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a bucket from its bytes (``memory``, uint8)."""
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        yield spec.name, memory[spec.offset : spec.offset + size_of(spec)].view(dtype).view(spec.shape)


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """Map the bytes of a segment without a copy: uint8 [size]. The descriptor may be closed afterwards."""
    # Copy on write: torch has no read-only tensors. If a loader writes to them, it changes private pages only.
    return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def sum_of_words(memory: torch.Tensor) -> int:
    """Return the sum of the 64-bit words of uint8 ``memory``, and of the bytes after the last, modulo 2^64."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64).sum()
    return int(words + memory[whole:].sum(dtype=torch.int64)) % (1 << 64)

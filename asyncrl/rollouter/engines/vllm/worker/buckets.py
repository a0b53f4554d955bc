"""The tensors of a version that lies in sealed memory. It imports nothing of vLLM."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import torch

from asyncrl.messages.weights import Bucket, Manifest, TensorSpec
from asyncrl.weights.segments import size_of


def tensors_of(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a version whose paths this process can open; views that outlive no bucket's memory."""
    for bucket in manifest.buckets:
        yield from tensors_in(_mapped(bucket), bucket.tensors)


def tensors_in(memory: torch.Tensor, specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of its bytes."""
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        size = size_of(spec)
        if size:
            yield spec.name, memory[spec.offset : spec.offset + size].view(dtype).view(spec.shape)
        else:
            yield spec.name, torch.empty(spec.shape, dtype=dtype)


def _mapped(bucket: Bucket) -> torch.Tensor:
    """The bytes of a bucket's segment: uint8 [size]."""
    descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Copy on write: a loader that works in place changes pages of its own.
        mapping = mmap.mmap(descriptor, bucket.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)

"""A copy of the newest version in the memory of a GPU that a rank of the learner and an engine share (CUDA IPC).

The learner fills the copy when it takes the weights of a version, and describes it in the manifest. A worker of an
engine on that GPU copies a bucket from there to memory of its own, and loads it from there. So the weights do not pass
through host memory while the engine is paused. The version is in sealed segments all the same, for all others.

Invariant: a worker loads no other bytes than those of the segment. The learner does not wait for workers, so the next
version may overwrite the copy while a worker reads it, and the learner may die. Therefore a worker compares what it has
read with the sum of the bucket's 64-bit words. If they differ, or the memory cannot be opened, it takes the bucket from
its segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.messages.weights import Bucket, DeviceCopy, Manifest
from asyncrl.weights.device_memory import DeviceMemory
from asyncrl.weights.held_version import size_of
from asyncrl.weights.tensors import sum_of_words

_LOG = logging.getLogger(__name__)


class CopyWriter:
    """The learner's side: the memory of the copy, and where it holds the tensors of each bucket."""

    def __init__(self, memory: DeviceMemory, gpu: str) -> None:
        """``gpu`` is the UUID of the GPU."""
        # The memory stays until the process ends, because a worker may be reading it.
        self._handle, self._gpu = memory.handle, gpu
        self.memory = memory.tensor
        """uint8 [size]."""
        self._places: dict[tuple[str, int], int] = {}
        """Offset of each tensor in the memory, by its name in versions and its size (bytes)."""

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Note where the memory holds these tensors; leave out tensors in other memory."""
        start = self.memory.data_ptr()
        for name, tensor in tensors.items():
            offset = tensor.data_ptr() - start
            if 0 <= offset <= len(self.memory) - tensor.nbytes and tensor.is_contiguous():
                self._places[name, tensor.nbytes] = offset

    def describe(self, buckets: Sequence[Bucket], sums: list[int]) -> DeviceCopy:
        """Describe the copy of a version. ``sums`` has the sum of the words of each bucket.

        A bucket with a tensor that the copy lacks gets no offsets: workers take it from its segment.
        """
        offsets = []
        for bucket in buckets:
            places = [(spec.name, size_of(spec)) for spec in bucket.tensors]
            offsets.append([self._places[place] for place in places] if self._places.keys() >= {*places} else [])
        return DeviceCopy(gpu=self._gpu, handle=self._handle, size=len(self.memory), offsets=offsets, sums=sums)


class CopyReader:
    """A worker's side. ``gpu`` is the UUID of the worker's GPU, "" on CPU. Call ``close`` after each load."""

    def __init__(self, gpu: str, device: torch.device, open_memory: Callable[[bytes, int], DeviceMemory]) -> None:
        self._gpu, self._device, self._open_memory = gpu, device, open_memory
        self._opened: DeviceMemory | None = None
        """The learner's memory while it is open here; ``close`` makes it None."""
        self._refused = b""
        """Handle of memory that could not be opened or read; it is not tried again."""
        self.buckets_read = 0
        """Number of buckets that came from copies."""

    def read(self, manifest: Manifest, index: int) -> Tensor | None:
        """Return the bytes of a bucket, uint8 [size] on the device; None if they must come from the segment."""
        copy, bucket = manifest.device, manifest.buckets[index]
        if copy is None or copy.gpu != self._gpu or copy.handle == self._refused or not copy.offsets[index]:
            return None
        try:
            if self._opened is None:
                self._opened = self._open_memory(copy.handle, copy.size)
            # Zeros, because the gaps between the tensors of a segment are zero, and the sum includes them.
            memory = torch.zeros(bucket.size, dtype=torch.uint8, device=self._device)
            for spec, offset in zip(bucket.tensors, copy.offsets[index], strict=True):
                size = size_of(spec)
                memory[spec.offset : spec.offset + size] = self._opened.tensor[offset : offset + size]
        except (OSError, RuntimeError) as error:
            self._refused = copy.handle
            _LOG.warning("weights come through host memory: the learner's copy on the GPU cannot be read: %s", error)
            return None
        if sum_of_words(memory) != copy.sums[index]:
            _LOG.info("bucket %d of version %d comes through host memory: its copy changed", index, manifest.version)
            return None
        self.buckets_read += 1
        return memory

    def close(self) -> None:
        """Close the learner's memory. While it is open here, the GPU does not free it, even if the learner dies."""
        opened, self._opened = self._opened, None
        if opened is not None:
            try:
                opened.close()
            except (OSError, RuntimeError) as error:
                _LOG.warning("the learner's copy on the GPU cannot be closed: %s", error)

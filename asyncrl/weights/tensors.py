"""The tensors of a version: views of its segments, or of a copy in the memory of a GPU.

A view keeps its bucket in memory. The copy is for a GPU that a rank of the learner and an engine share (CUDA IPC). The
learner fills it when it takes the weights for a version or an export, and describes it in the manifest. A worker of an
engine on that GPU copies a bucket from there to memory of its own, and loads it from there. So the weights do not pass
through host memory while the engine is paused. The version is in sealed segments all the same, for all others.

Invariant: a worker loads no other bytes than those of the segment. The learner does not wait for workers, so the next
version or export may overwrite the copy while a worker reads it. The learner may die too: then CUDA does not define
what the others read. Therefore a worker compares what it has read with the sum of the bucket's 64-bit words. If they
differ, or the memory cannot be opened, it takes the bucket from its segment.

Fails with OSError that names the call of CUDA and its error, or the path that cannot be opened.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from asyncrl.messages.weights import Bucket, DeviceCopy, Manifest, TensorSpec
from asyncrl.weights.held_version import size_of

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Flag that cudaIpcOpenMemHandle needs; it takes no other."""
_LOG = logging.getLogger(__name__)


def tensors_of(
    manifest: Manifest, elsewhere: Callable[[Manifest, int], Tensor | None] = lambda manifest, index: None
) -> Iterator[tuple[str, Tensor]]:
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


def tensors_in(memory: Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a bucket from its bytes (``memory``, uint8)."""
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        yield spec.name, memory[spec.offset : spec.offset + size_of(spec)].view(dtype).view(spec.shape)


def mapped(descriptor: int, size: int) -> Tensor:
    """Map the bytes of a segment without a copy: uint8 [size]. The descriptor may be closed afterwards."""
    # Copy on write: torch has no read-only tensors. If a loader writes to them, it changes private pages only.
    return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def sum_of_words(memory: Tensor) -> int:
    """Return the sum of the 64-bit words of uint8 ``memory``, and of the bytes after the last, modulo 2^64."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64).sum()
    return int(words + memory[whole:].sum(dtype=torch.int64)) % (1 << 64)


# --- a copy in the memory of a GPU ---


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


# --- memory of a GPU for two processes ---


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class DeviceMemory:
    """One piece of memory of the current GPU: one process allocates it, and another opens it by a handle.

    The memory stays while it is open here, or the process that allocated it lives. It comes from cudaMalloc, not from
    torch's allocator: a process may not open the expandable segments of another one, and the share of a rank limits
    torch's allocator alone.
    """

    def __init__(self, address: int, size: int, handle: bytes) -> None:
        """Called by ``allocate`` and ``open``."""
        self.handle = handle
        """Bytes by which another process opens the memory."""
        self.tensor: Tensor = _view(address, size)
        """The memory: uint8 [size]."""
        self._address = address

    @classmethod
    def allocate(cls, size: int) -> DeviceMemory:
        """Allocate ``size`` bytes. Raises OSError."""
        address, handle = ctypes.c_void_p(), _Handle()
        _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        try:
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        except OSError:
            _call("cudaFree", address)
            raise
        return cls(address.value or 0, size, bytes(handle))

    @classmethod
    def open(cls, handle: bytes, size: int) -> DeviceMemory:
        """Open memory of another process: ``size`` bytes behind its ``handle``. Raises OSError."""
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        _call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return cls(address.value or 0, size, handle)

    def close(self) -> None:
        """Close memory that ``open`` has opened; no tensor may use it afterwards. Raises OSError."""
        del self.tensor
        torch.cuda.synchronize()
        _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))


def gpu_id(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _view(address: int, size: int) -> Tensor:
    """Return memory of the GPU as a tensor, uint8 [size], without a copy (numba's CUDA array interface)."""

    class Array:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    return torch.as_tensor(Array(), device="cuda")


@cache
def _runtime() -> Any:
    # torch has loaded the CUDA runtime, so the loader returns that library.
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA runtime. Raises OSError that names it and its error."""
    # The first call makes the context of the current GPU in this thread.
    torch.cuda.current_stream()
    library = _runtime()
    if code := getattr(library, name)(*arguments):
        # A failed call leaves its error for the next caller, which would be torch.
        library.cudaGetLastError()
        raise OSError(f"{name}: {library.cudaGetErrorString(code).decode()}")

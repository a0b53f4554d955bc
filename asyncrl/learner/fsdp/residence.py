"""Moves a rank's weights and optimizer states out of its GPU's memory and back, for time slices of a GPU.

The storage of each tensor is emptied and later filled again. So the tensors stay the same objects: FSDP2, the optimizer
and the views that copy shards for a version keep what they hold. On a CPU the tensors go through the same steps.

Invariants: values do not change. Between ``leave`` and ``come_back`` nothing reads the tensors. Fails with torch's
OutOfMemoryError if the device does not have room for the tensors in time. Each wait for room calls a function ``pause``
with the seconds until the next look at the memory. ``pause`` may raise, which ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from asyncrl.learner.fsdp.model.policy import local

LOOK_S = 0.1
"""Time between two attempts to allocate (s)."""
CHUNK_BYTES = 256 << 20
"""Size of a piece of host memory. torch rounds pinned memory up to a power of two, which wastes other sizes."""


class Residence:
    """The tensors of one rank that leave its device together."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        """``tensors`` returns the present tensors. A tensor that is not on ``device`` stays where it is."""
        self._tensors, self._device, self._on_gpu = tensors, device, device.type == "cuda"
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []
        """Each emptied storage, with its size (bytes) and its offset in the host memory."""
        self._chunks: list[Tensor] = []
        """Host memory, CHUNK_BYTES each. It is kept, because pinned memory is slow to allocate."""

    def leave(self) -> None:
        """Copy everything to host memory, and free the memory of the device."""
        assert not self._away, "they are away"
        offset = 0
        for storage in self._storages():
            size = storage.nbytes()
            for host, device in self._pieces(_bytes(storage), offset):
                host.copy_(device)
            self._away.append((storage, size, offset))
            offset += size
        for storage, _, _ in self._away:
            storage.resize_(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def come_back(self, within_s: float = 0.0, pause: Callable[[float], None] = time.sleep) -> None:
        """Allocate the memory on the device again, and copy everything back.

        An engine that was killed frees its memory with a delay, so an allocation that fails is repeated for up to
        ``within_s``. Then OutOfMemoryError is raised.
        """
        deadline = time.monotonic() + within_s
        while self._away:
            storage, size, offset = self._away[-1]
            try:
                storage.resize_(size)
            except torch.OutOfMemoryError:
                if time.monotonic() > deadline:
                    raise
                pause(LOOK_S)
                continue
            for host, device in self._pieces(_bytes(storage), offset):
                device.copy_(host)
            self._away.pop()

    def _pieces(self, device: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pieces of the host memory from byte ``offset`` on, each with its piece of ``device`` (uint8).

        A piece ends where a chunk ends. Chunks that do not exist yet are allocated.
        """
        done = 0
        while done < len(device):
            chunk, start = divmod(offset + done, CHUNK_BYTES)
            if chunk == len(self._chunks):
                self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu))
            size = min(len(device) - done, CHUNK_BYTES - start)
            yield self._chunks[chunk][start : start + size], device[done : done + size]
            done += size

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield each storage on the device once, although tied weights and views share one; no empty storages."""
        seen = set[int]()
        for tensor in self._tensors():
            part = local(tensor)
            storage = part.untyped_storage()
            key = storage._cdata
            if part.device.type == self._device.type and storage.nbytes() and storage.resizable() and key not in seen:
                seen.add(key)
                yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def wait_for_gpu_memory(device: torch.device, share: float, within_s: float, pause: Callable[[float], None]) -> None:
    """Wait until ``share`` of a GPU's memory is free, for ``within_s`` at most; returns at once on a CPU.

    An engine that was killed frees its memory with a delay. After ``within_s`` the function returns all the same, and
    a later allocation may fail.
    """
    deadline = time.monotonic() + within_s
    while device.type == "cuda" and time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info(device)
        if free >= share * total:
            return
        pause(LOOK_S)

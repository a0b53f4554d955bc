"""Moves a rank's weights and optimizer states out of its GPU's memory and back, for time slices of a GPU.

The storage of each tensor is emptied and later filled again. So the tensors stay the same objects: FSDP2, the optimizer
and the views that copy shards for a version keep what they hold. On CPUs the same is done, as a rehearsal.

Invariants: values do not change. Between ``leave`` and ``come_back`` nothing reads the tensors. Fails with torch's
OutOfMemoryError if the device has no room in time for what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from asyncrl.learner.fsdp.model.policy import local

LOOK_S = 0.1
"""Time between two attempts to allocate (s)."""


class Residence:
    """The tensors of one rank that leave its device together."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        """``tensors`` returns the present ones. Those that are not on ``device`` stay where they are."""
        self._tensors, self._device, self._on_gpu = tensors, device, device.type == "cuda"
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Each emptied storage, with its bytes in host memory."""
        self._spare: dict[int, list[Tensor]] = {}
        """Host memory of earlier moves, by its size: pinned memory is slow to allocate."""

    def leave(self) -> None:
        """Copy everything to host memory, and free the memory of the device."""
        assert not self._away, "they are away"
        for storage in self._storages():
            spare = self._spare.get(storage.nbytes())
            host = spare.pop() if spare else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._on_gpu)
            host.copy_(_bytes(storage))
            self._away.append((storage, host))
        self._spare.clear()
        for storage, _ in self._away:
            storage.resize_(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def come_back(self, within_s: float = 0.0) -> None:
        """Allocate the memory on the device again, and copy everything back.

        The memory of an engine that was killed is free a little later; the wait for it lasts at most ``within_s``.
        """
        until = time.monotonic() + within_s
        while self._away:
            storage, host = self._away[-1]
            try:
                storage.resize_(host.nbytes)
            except torch.OutOfMemoryError:
                if time.monotonic() > until:
                    raise
                time.sleep(LOOK_S)
                continue
            _bytes(storage).copy_(host)
            self._spare.setdefault(host.nbytes, []).append(host)
            self._away.pop()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield each storage once, although tied weights and views share theirs."""
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

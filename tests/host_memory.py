"""Memory of this host that two processes can open, in place of a GPU's (CUDA IPC)."""

from __future__ import annotations

import mmap
import os

import torch

GPU = "GPU-5c1f"
"""Identity of the GPU that it stands for."""


class HostMemory:
    """Memory behind a path, which is the handle."""

    def __init__(self, handle: bytes, size: int) -> None:
        self.handle = handle
        descriptor = os.open(handle, os.O_RDWR)
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        os.close(descriptor)
        self.closed = False

    def close(self) -> None:
        self.closed = True

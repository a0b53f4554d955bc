"""Memory of a GPU that two processes of a host use: one allocates it, and the other opens it by a handle (CUDA IPC).

The memory comes from cudaMalloc. torch's allocator is not used: a process may not open the expandable segments of
another one, and the share of a rank limits torch's allocator alone.

Invariant: the memory stays while it is open here, or the process that allocated it lives. After the end of that process
CUDA does not define what the others read, so each reader verifies what it reads.

Fails with OSError that names the call of CUDA and its error.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Flag that cudaIpcOpenMemHandle needs; it takes no other."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class DeviceMemory:
    """One piece of memory of the current GPU."""

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

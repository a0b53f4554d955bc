"""NCCL: the bytes of a broadcast from rank 0's GPU to those of all members, which take them as vLLM does.

A member is vLLM's own NCCLWeightTransferEngine (rollouter/engines/vllm/worker/nccl.py), reached with the unique id
that rank 0 makes. Both sides must do in the same order: ncclCommInitRank, one all-reduce of one float, then one
broadcast of uint8 for every bucket that has tensors, packed as packing.py says.

Buckets go through two buffers on the device: one is filled from the bucket's memory while the other is broadcast.
NCCL waits for ever: every wait here watches the links, and ends by aborting the communicator.

Importing this module needs neither CUDA nor NCCL. Fails with ConfigError where they cannot be had, with RuntimeError
carrying NCCL's own words, and as the waiter does.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import ConfigError
from asyncrl.messages.weights import BucketLayout
from asyncrl.weights.collective.links import Link
from asyncrl.weights.collective.packing import packed_bytes, runs
from asyncrl.weights.collective.waiting import Waiter

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""Values of ncclDataType_t and ncclRedOp_t."""
LOOK_EVERY_S = 0.001
"""Seconds between looks at an event of the device."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclAllReduce": [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ],
    "ncclBroadcast": [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ],
    "ncclCommAbort": [ctypes.c_void_p],
}


def library_candidates() -> list[str]:
    """Paths at which NCCL is looked for, in this order; vLLM looks in the same places."""
    chosen = os.environ.get("VLLM_NCCL_SO_PATH")
    if chosen:
        return [chosen]
    found = []
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / "lib" / "libnccl.so.2"
        if path.is_file():
            found.append(str(path))
    return [*found, "libnccl.so.2"]


class Library:
    """The functions of libnccl that a broadcast needs."""

    def __init__(self, candidates: Sequence[str]) -> None:
        """Load the first library that can be. Raises ConfigError."""
        problems = []
        for path in candidates:
            try:
                self._library = ctypes.CDLL(path)
                for name, arguments in _SIGNATURES.items():
                    function = getattr(self._library, name)
                    function.argtypes, function.restype = arguments, ctypes.c_int
                self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
                self._library.ncclGetErrorString.restype = ctypes.c_char_p
            except (OSError, AttributeError) as error:
                problems.append(str(error))
            else:
                return
        raise ConfigError(
            [
                f"weights.transport: nccl needs NCCL, which could not be loaded ({'; '.join(problems)}); install "
                "nvidia-nccl or set VLLM_NCCL_SO_PATH, or choose another transport"
            ]
        )

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Raises RuntimeError unless it succeeds."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(result).decode()}")


class Nccl:
    """Rank 0's way to groups over NCCL, on the CUDA device that is current when it is made."""

    def __init__(self) -> None:
        self._library = Library(library_candidates())
        if not torch.cuda.is_available():
            raise ConfigError(["weights.transport: nccl needs a GPU here; choose another transport"])
        self._device = torch.cuda.current_device()

    def invite(self, size: int) -> tuple[bytes, Callable[[], NcclGroup]]:
        """Invitation of members to a new group of ``size``, and the call that forms it on this side, which blocks."""
        unique_id = _UniqueId()
        self._library.call("ncclGetUniqueId", ctypes.byref(unique_id))
        text = base64.b64encode(bytes(unique_id))
        return text, lambda: NcclGroup(self._library, unique_id, size, self._device)


def pack(memory: torch.Tensor, layout: BucketLayout, buffer: torch.Tensor) -> None:
    """Copy the tensors of a bucket to the beginning of ``buffer``, back to back. Both are uint8."""
    for run in runs(layout):
        source = memory[run.source : run.source + run.size]
        buffer[run.target : run.target + run.size].copy_(source, non_blocking=True)


class _Slot:
    """A buffer on the device. ``sent`` is the event of its last broadcast."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.sent: Any = None

    def is_free(self) -> bool:
        return self.sent is None or self.sent.query()


class NcclGroup:
    """Rank 0 of a group. Blocks until all are there."""

    def __init__(self, library: Library, unique_id: _UniqueId, size: int, device: int) -> None:
        self._library = library
        self._device = device
        self._communicator: ctypes.c_void_p | None = ctypes.c_void_p()
        self._slots = [_Slot(), _Slot()]
        # The current device is each thread's own, and the group is formed on a thread that is made for it.
        with torch.cuda.device(device):
            new_stream: Any = torch.cuda.Stream
            self._copying, self._sending = new_stream(), new_stream()
            library.call("ncclCommInitRank", ctypes.byref(self._communicator), size, unique_id, 0)
            with torch.cuda.stream(self._sending):
                greeting = torch.zeros(1, device="cuda")
                pointer = greeting.data_ptr()
                self._run("ncclAllReduce", pointer, pointer, 1, FLOAT32, SUM)
            self._sending.synchronize()

    def _run(self, name: str, *arguments: Any) -> None:
        assert self._communicator is not None, "the group is closed"
        with torch.cuda.device(self._device):
            self._library.call(name, *arguments, self._communicator, self._sending.cuda_stream)

    def send(self, memory: torch.Tensor, layout: BucketLayout, waiter: Waiter, watching: Sequence[Link]) -> None:
        """Broadcast the tensors of a bucket to all, packed; returns once the copy to the device is under way."""
        if not layout.tensors:
            return
        slot = self._slots[0]
        self._slots.reverse()
        self._wait(slot, waiter, watching)
        size = packed_bytes(layout)
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self._copying):
                # The last broadcast out of this buffer is over, so that it may be freed and written to.
                if slot.buffer is None or slot.buffer.numel() < size:
                    slot.buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
                pack(memory, layout, slot.buffer)
            self._sending.wait_stream(self._copying)
        pointer = slot.buffer.data_ptr()
        # NCCL may connect to the others only now.
        waiter.call(
            lambda: self._run("ncclBroadcast", pointer, pointer, size, UINT8, 0),
            "a broadcast to begin",
            discard=lambda _: None,
            watching=watching,
        )
        slot.sent = self._sending.record_event()

    def flush(self, waiter: Waiter, watching: Sequence[Link]) -> None:
        """Wait until everything has been sent."""
        for slot in self._slots:
            self._wait(slot, waiter, watching)

    def _wait(self, slot: _Slot, waiter: Waiter, watching: Sequence[Link]) -> None:
        waiter.until(slot.is_free, "a bucket to be broadcast", watching=watching, look_every_s=LOOK_EVERY_S)

    def close(self) -> None:
        """Leave the group, also in the middle of a transfer. May be repeated."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # ncclCommDestroy would wait for the others, and even this may take its time.
            threading.Thread(target=self._abort, args=(communicator,), name="asyncrl: end of NCCL", daemon=True).start()

    def _abort(self, communicator: ctypes.c_void_p) -> None:
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
            self._library.call("ncclCommAbort", communicator)

"""Memory of a GPU that two processes use."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from asyncrl.weights import device_memory
from asyncrl.weights.device_memory import HANDLE_BYTES, DeviceMemory

SIZE = 3 << 20


def _add_one(handle: bytes) -> None:
    opened = DeviceMemory.open(handle, SIZE)
    opened.tensor.add_(1)
    torch.cuda.synchronize()
    opened.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_another_process_reads_and_writes_the_same_memory() -> None:
    memory = DeviceMemory.allocate(SIZE)
    assert len(memory.handle) == HANDLE_BYTES
    memory.tensor.copy_(torch.arange(SIZE, device="cuda") % 251)
    torch.cuda.synchronize()
    process = multiprocessing.get_context("spawn").Process(target=_add_one, args=(memory.handle,))
    process.start()
    process.join(120.0)
    assert process.exitcode == 0
    assert torch.equal(memory.tensor.cpu(), (torch.arange(SIZE) % 251 + 1).to(torch.uint8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_missing_device_memory_is_an_error_and_leaks_nothing() -> None:
    with pytest.raises(OSError, match=r"cudaIpcOpenMemHandle: "):
        DeviceMemory.open(bytes(HANDLE_BYTES), SIZE)
    with pytest.raises(OSError, match=r"cudaMalloc: out of memory"):
        DeviceMemory.allocate(1 << 50)
    assert torch.ones(1, device="cuda").item() == 1


class Runtime:
    """CUDA's runtime on a host without a GPU: its calls fail with code 2."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 2

        return call

    def cudaGetErrorString(self, code: int) -> bytes:
        return f"error {code}".encode()


def test_a_failed_call_is_an_error_of_the_user_and_not_of_the_next_kernel(monkeypatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(device_memory, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(OSError, match=r"^cudaMalloc: error 2$"):
        DeviceMemory.allocate(SIZE)
    with pytest.raises(OSError, match=r"^cudaIpcOpenMemHandle: error 2$"):
        DeviceMemory.open(bytes(HANDLE_BYTES), SIZE)
    assert runtime.calls == ["cudaMalloc", "cudaGetLastError", "cudaIpcOpenMemHandle", "cudaGetLastError"]

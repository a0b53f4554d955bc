"""A copy of the weights on the learner's GPU, and memory of a GPU that two processes use.

For the copy, host memory that two processes can open stands in for the GPU's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from host_memory import GPU, HostMemory
from learner.learner_cases import make_config, plan_of, save_small_model
from learner.rank_pool import run_alone
from segment_reading import map_segment

from asyncrl.config.algorithm import LoraConfig
from asyncrl.gpu.memory_shares import GpuShares
from asyncrl.learner.fsdp import trainer
from asyncrl.learner.fsdp.weights.assembly import Assembly, publish
from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.weights import tensors
from asyncrl.weights.held_version import HeldVersion, place_tensors
from asyncrl.weights.tensors import HANDLE_BYTES, CopyReader, CopyWriter, DeviceMemory, tensors_of

SIZE = 3 << 20
CPU = torch.device("cpu")


@pytest.fixture
def allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # A handle has at most 64 bytes.
    monkeypatch.chdir(tmp_path)

    def make(size: int) -> CopyWriter:
        path = Path(f"memory{len(list(tmp_path.glob('memory*')))}")
        path.write_bytes(b"\xff" * size)
        return CopyWriter(HostMemory(bytes(path), size), GPU)

    return make


def reader(gpu: str = GPU) -> CopyReader:
    return CopyReader(gpu, CPU, HostMemory)


def received(version: HeldVersion) -> Manifest:
    """The manifest as a worker receives it."""
    return msgspec.json.decode(msgspec.json.encode(version.manifest), type=Manifest)


def differing(manifest: Manifest, copies: CopyReader) -> Iterator[int]:
    """Yield the buckets that the reader does not take from the copy; others have exactly the bytes of the segment."""
    for index, bucket in enumerate(manifest.buckets):
        memory = copies.read(manifest, index)
        if memory is None:
            yield index
        else:
            assert memory.numpy().tobytes() == bytes(map_segment(bucket, version=manifest.version, index=index))


def _published(backend: Any, config: Any, allocate: Any) -> None:
    assembly = Assembly(
        backend.policy,
        backend._ranks,
        dtype=getattr(torch, config.learner.dtype) if config.learner.dtype != "auto" else torch.float32,
        bucket_bytes=config.weights.bucket_bytes,
        adapters_alone=False,
        make_copy=allocate,
    )
    copies = reader()

    def version(number: int) -> HeldVersion:
        return assembly.begin("version", lambda gathered: publish(gathered, number, copy=assembly.gpu_copy)).result()

    with version(1) as first:
        old = received(first)
        assert len(old.buckets) > 1
        assert list(differing(old, copies)) == []
        assert copies.buckets_read == len(old.buckets)
        backend.train(plan_of(backend, config, 0))
        # The copy is still that of version 1.
        assert list(differing(old, copies)) == []
        with version(2) as second:
            new = received(second)
            assert list(differing(new, copies)) == []
            # Version 1 is overwritten where the step has changed a weight.
            pairs = enumerate(zip(old.buckets, new.buckets, strict=True))
            changed = [index for index, (before, after) in pairs if before.checksum != after.checksum]
            assert changed and list(differing(old, copies)) == changed
            weights = dict(tensors_of(old, copies.read))
            assert weights.keys() == dict(tensors_of(new)).keys()
            assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors_of(old))
    assembly.close()


@pytest.mark.parametrize(
    ("tied", "extra"),
    [(False, {}), (True, {"dtype": "bfloat16"}), (False, {"lora": {"rank": 4, "publish": "merged"}})],
    ids=["whole", "tied", "merged adapters"],
)
def test_i4_a_bucket_from_the_copy_has_the_bytes_of_its_segment(tied, extra, tmp_path, allocate) -> None:
    lora = LoraConfig(**extra.pop("lora", {}))
    config = make_config(save_small_model(tmp_path / "model", tied=tied), bucket_bytes=100_000, **extra)
    run_alone(config.model_copy(update={"lora": lora}), _published, allocate)


@pytest.fixture
def version(allocate) -> Iterator[tuple[Manifest, CopyWriter]]:
    writer = allocate(1 << 16)
    contents = [{"a": torch.arange(100.0), "b": torch.ones(3, 5)}, {"c": torch.full((7,), 3, dtype=torch.uint8)}]
    at = 0
    for bucket in contents:
        for name, tensor in bucket.items():
            inside = writer.memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            inside.copy_(tensor)
            writer.place({name: inside})
            at += 1024
    with publish(iter(contents), 5, copy=writer) as held:
        yield received(held), writer


def test_i4_a_changed_byte_is_found(version) -> None:
    manifest, writer = version
    assert list(differing(manifest, reader())) == []
    writer.memory[1024 + 8] ^= 1
    assert list(differing(manifest, reader())) == [0]


def test_a_worker_on_another_gpu_uses_the_segments(version) -> None:
    manifest, _ = version
    assert list(differing(manifest, reader("GPU-other"))) == [0, 1]
    assert list(differing(msgspec.structs.replace(manifest, device=None), reader())) == [0, 1]


def test_device_memory_that_cannot_be_opened_is_tried_once(version, caplog) -> None:
    manifest, _ = version
    Path(os.fsdecode(manifest.device.handle)).unlink()
    assert list(differing(manifest, copies := reader())) == [0, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "No such file" in caplog.text
    assert copies.buckets_read == 0


def test_the_memory_is_opened_once_for_a_load_and_closed_after_it(version) -> None:
    manifest, _ = version
    copies = reader()
    assert list(differing(manifest, copies)) == []
    opened = copies._opened
    assert isinstance(opened, HostMemory)
    assert list(differing(manifest, copies)) == [] and copies._opened is opened
    copies.close()
    assert opened.closed and copies._opened is None
    copies.close()
    assert list(differing(manifest, copies)) == [] and copies._opened is not opened


def test_i4_tensors_are_found_by_name_and_a_bucket_with_a_missing_one_is_skipped(allocate) -> None:
    def bucket(**sizes: int) -> Bucket:
        specs, size = place_tensors([(name, "uint8", (length,)) for name, length in sizes.items()])
        return Bucket(path="", size=size, checksum=0, tensors=specs)

    writer = allocate(4096)
    inside, flipped = writer.memory, writer.memory.view(64, 64).T
    writer.place({"a": inside[:64], "b": inside[64:128], "other": torch.zeros(8), "flipped": flipped})
    buckets = [
        bucket(a=64),
        bucket(b=64, a=64),
        bucket(a=64, other=32),
        bucket(flipped=4096),
        bucket(a=63),
        bucket(c=1),
    ]
    assert writer.describe(buckets, [0] * 6).offsets == [[0], [64, 0], [], [], [], []]


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_rank_makes_a_copy_if_its_shares_have_room(has_copy, tmp_path, allocate) -> None:
    shares = GpuShares(0.5, 0.4, "off", 1 << 16, 1 << 30, has_copy=has_copy)

    def main(backend: Any, config: Any) -> list[bool]:
        found = []
        for number in (1, 2):
            with backend.publish(number).result() as held:
                found.append(held.manifest.device is not None)
                assert (list(differing(received(held), reader())) == []) is has_copy
        return found

    with (
        mock.patch.object(trainer, "limit_memory", return_value=shares),
        mock.patch.object(trainer, "make_copy", side_effect=lambda size, device: allocate(size)),
    ):
        assert run_alone(make_config(save_small_model(tmp_path / "model")), main) == [has_copy] * 2


def test_no_room_for_a_copy_costs_only_the_copy(tmp_path, caplog) -> None:
    def refuse(size: int) -> CopyWriter:
        raise OSError("cudaMalloc: out of memory")

    def main(backend: Any, config: Any) -> None:
        arguments = {"dtype": torch.float32, "bucket_bytes": 1 << 20, "adapters_alone": False}
        assembly = Assembly(backend.policy, backend._ranks, make_copy=refuse, **arguments)
        with assembly.begin("version", lambda gathered: publish(gathered, 1, copy=assembly.gpu_copy)).result() as held:
            assert held.manifest.device is None
        assembly.close()

    run_alone(make_config(save_small_model(tmp_path / "model")), main)
    assert "through host memory: cudaMalloc: out of memory" in caplog.text


# --- memory of a GPU for two processes ---


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
    monkeypatch.setattr(tensors, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(OSError, match=r"^cudaMalloc: error 2$"):
        DeviceMemory.allocate(SIZE)
    with pytest.raises(OSError, match=r"^cudaIpcOpenMemHandle: error 2$"):
        DeviceMemory.open(bytes(HANDLE_BYTES), SIZE)
    assert runtime.calls == ["cudaMalloc", "cudaGetLastError", "cudaIpcOpenMemHandle", "cudaGetLastError"]

"""The vLLM worker's side of a broadcast over NCCL, against the real sender, with the GPUs left out.

A stand-in for NCCL hands packed buckets from one thread to another. Everything else is the real thing: frames,
links, packing, vLLM's description of a bucket and its way of taking one apart.
"""

from __future__ import annotations

import base64
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollouter.engines.engine_cases import LONG_S, buckets_of, part_of, send
from tiny_models import Publisher
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from asyncrl.errors import BroadcastFailed
from asyncrl.rollouter.engines.vllm.worker import nccl as worker_side
from asyncrl.rollouter.engines.vllm.worker.nccl import NcclReceiver
from asyncrl.weights.collective import nccl as learner_side
from asyncrl.weights.collective import sender as sender_side
from asyncrl.weights.collective.packing import packed_bytes
from asyncrl.weights.collective.sender import Sender

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning")


class Wire:
    """Buckets that were packed and not yet received."""

    def __init__(self) -> None:
        self.buckets: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.infos: list[Any] = []
        self.aborted = threading.Event()
        self.disabled = False
        self.lost = False
        """Whether buckets are announced whose bytes do not come."""


@pytest.fixture
def wire(monkeypatch):
    made = Wire()

    class Group:
        def send(self, memory, layout, *_):
            if layout.tensors and not made.lost:
                buffer = torch.empty(packed_bytes(layout), dtype=torch.uint8)
                learner_side.pack(memory, layout, buffer)
                made.buckets.put(buffer)

        def flush(self, waiter, watching):
            waiter.until(lambda: not made.lost, "its buckets to be received", watching=watching)

        def close(self):
            pass

    class Backend:
        def invite(self, size):
            return base64.b64encode(bytes(range(128))), Group

    class Engine:
        def __init__(self, config, vllm_config, device, model):
            self.model = model
            self.model_update_group: Any = None

        def init_transfer_engine(self, info):
            assert info.nccl_unique_id_bytes == bytes(range(128))
            made.infos.append(info)
            self.model_update_group = SimpleNamespace(disabled=made.disabled)

        def receive_weights(self, info):
            buffer = made.buckets.get(timeout=LONG_S)
            if buffer is None:
                # As an aborted communicator: nothing came, and nothing is said of it.
                return
            dtypes = [getattr(torch, name) for name in info.dtype_names]
            sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(info.shapes, dtypes, strict=True)]
            assert sum(sizes) == buffer.numel() <= made.infos[-1].packed_buffer_size_bytes
            self.model.load_weights(unpack_tensor(buffer, info.names, info.shapes, dtypes, sizes))

        def shutdown(self):
            made.aborted.set()
            made.buckets.put(None)

    monkeypatch.setattr(sender_side, "Nccl", Backend)
    monkeypatch.setattr(worker_side, "NCCLWeightTransferEngine", Engine)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    return made


@pytest.fixture
def parts(wire):
    """(sender, receiver, publisher)"""
    receiver = NcclReceiver(None, None, torch.device("cpu"))
    with closing(Publisher()) as publisher, closing(Sender("nccl", "127.0.0.1", LONG_S)) as sender, closing(receiver):
        yield sender, receiver, publisher


def tensors(version: int) -> dict[str, torch.Tensor]:
    # Between the first two a segment has padding, which is not sent.
    return {
        "a": torch.arange(100.0) + version,
        "b": torch.full((3, 5), version, dtype=torch.bfloat16),
        "c": torch.full((2,), version, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
    }


def test_versions_arrive_over_one_group(wire, parts):
    sender, receiver, publisher = parts
    with ThreadPoolExecutor(1) as pool:
        for version in range(3):
            expected, loaded = tensors(version), {}
            manifest = publisher.publish(version, expected)
            weights = part_of(sender, manifest, backend="nccl")
            receiving = pool.submit(receiver.receive, weights, 0, loaded.update)
            send(sender, weights, buckets_of(manifest))
            receiving.result(LONG_S)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    # One bucket is one broadcast: the buffer is as large as the largest, packed.
    [info] = wire.infos
    assert (info.packed, info.packed_buffer_size_bytes) == (True, 430)
    assert (info.rank_offset, info.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("aborted", "enough"),
        ("late", "waited 1 s for bucket 0 over NCCL"),
        ("disabled", "vLLM has disabled NCCL"),
    ],
)
def test_lost_bucket_does_not_pass_as_received_and_disabled_nccl_is_refused(wire, parts, why, words):
    sender, receiver, publisher = parts
    wire.lost, wire.disabled = why != "disabled", why == "disabled"
    manifest = publisher.publish(1, tensors(1))
    weights = part_of(sender, manifest, backend="nccl", timeout_s=1.0 if why == "late" else LONG_S)
    if why == "aborted":
        threading.Timer(0.5, sender.abort, ["enough"]).start()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, weights, 0, dict)
        with pytest.raises(BroadcastFailed, match=words):
            send(sender, weights, buckets_of(manifest))
        with pytest.raises(BroadcastFailed, match=words):
            receiving.result(LONG_S)
    assert wire.aborted.is_set() == (why != "disabled")

"""The engine and its worker load versions from the learner's copy on the GPU, for which host memory stands in.

Between them is no vLLM: the calls go straight to the worker's methods. The worker reloads a model of plain layers.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_memory import GPU, HostMemory
from rollouter.engines.changing import config_for
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from asyncrl.core.errors import WeightsCorrupt
from asyncrl.learner.fsdp.weights.assembly import publish
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.engines.vllm.worker import weights as worker_weights
from asyncrl.rollouter.engines.vllm.worker.weights import VersionLoader, WorkerMethods
from asyncrl.weights import tensors as weight_tensors
from asyncrl.weights.held_version import HeldVersion
from asyncrl.weights.tensors import CopyReader, CopyWriter

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)
        self.fails = False

    def load_weights(self, tensors: Any) -> set[str]:
        loaded, parameters = set(), dict(self.named_parameters())
        for name, tensor in tensors:
            if self.fails:
                raise RuntimeError("CUDA out of memory")
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
            loaded.add(name)
        return loaded


class Update:
    """An engine with one worker, and a learner's copy of its weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Model()
        record_metadata_for_reloading(self.model)
        model_config = SimpleNamespace(quantization=None, dtype="float32")
        self.loader = VersionLoader(self.model, model_config, CPU, 0)
        self.worker = WorkerMethods()
        self.worker.version_loader, self.worker.vllm_config, self.worker.device = self.loader, None, CPU
        monkeypatch.setattr(worker_weights, "set_current_vllm_config", nullcontext)
        self.loader._copies = CopyReader(GPU, CPU, HostMemory)
        self.mapped: list[int] = []
        """Sizes of the buckets that were read from their segments."""
        mapped = weight_tensors.mapped
        monkeypatch.setattr(
            weight_tensors, "mapped", lambda descriptor, size: self.mapped.append(size) or mapped(descriptor, size)
        )
        Path("memory").write_bytes(bytes(4096))
        self.writer = CopyWriter(HostMemory(b"memory", 4096), GPU)
        self.engine = VllmEngine(config_for("/m"), "rollouter/0")
        self.engine._llm = self
        errors = dict.fromkeys(("EngineDeadError", "EngineGenerateError"), KeyError)
        self.engine._vllm = SimpleNamespace(**errors)
        self.engine._paused = True

    # --- as AsyncLLM ---

    async def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> list[Any]:
        assert name == "load_version"
        return [self.worker.load_version(**kwargs)]

    async def update_weight_version(self, version: str) -> None: ...

    # --- the learner ---

    def publish(self, version: int) -> tuple[HeldVersion, dict[str, torch.Tensor]]:
        """Publish new weights, a bucket for each layer."""
        torch.manual_seed(version)
        new = {name: torch.randn_like(parameter) for name, parameter in self.model.named_parameters()}
        at = 0
        for name, tensor in new.items():
            inside = self.writer.memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            inside.copy_(tensor)
            self.writer.place({name: inside})
            at += 1024
        buckets = [{name: new[name] for name in new if name.startswith(layer)} for layer in ("first", "second")]
        return publish(iter(buckets), version, copy=self.writer), new

    def check(self, new: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, new[name]), name


@pytest.fixture
def update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Update:
    # A handle has at most 64 bytes.
    monkeypatch.chdir(tmp_path)
    return Update(monkeypatch)


async def test_i4_a_worker_loads_the_copy_or_the_segment_where_a_sum_differs(update: Update) -> None:
    held, new = update.publish(1)
    with held:
        await update.engine.load(held, recompute_kv=False)
        update.check(new)
        assert update.engine.loaded_by_ipc and update.mapped == []
        # Memory that stays open here is not freed by the GPU.
        assert update.loader._copies._opened is None
    held, new = update.publish(2)
    with held:
        # The learner overwrites the second layer.
        update.writer.memory[2048 + 4] ^= 1
        await update.engine.load(held, recompute_kv=False)
        update.check(new)
        assert not update.engine.loaded_by_ipc and update.mapped == [held.manifest.buckets[1].size]


async def test_i4_after_a_failed_load_a_worker_uses_the_segments(update: Update) -> None:
    held, new = update.publish(1)
    with held:
        update.model.fails = True
        with pytest.raises(WeightsCorrupt, match="CUDA out of memory"):
            await update.engine.load(held, recompute_kv=False)
        assert not update.engine.loaded_by_ipc
        update.model.fails = False
        await update.engine.load(held, recompute_kv=False)
        update.check(new)
        assert not update.engine.loaded_by_ipc and len(update.mapped) == 2
    held, new = update.publish(2)
    with held:
        await update.engine.load(held, recompute_kv=False)
        update.check(new)
        assert update.engine.loaded_by_ipc and len(update.mapped) == 2

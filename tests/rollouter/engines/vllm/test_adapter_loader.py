"""The worker's loading of an adapter, over a manager that forgets adapters as vLLM's would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.core.errors import ConfigError
from asyncrl.rollouter.engines.vllm.launch import _require_lora_support
from asyncrl.rollouter.engines.vllm.options import WITHOUT_ADAPTERS
from asyncrl.rollouter.engines.vllm.worker.lora import ADAPTER_ID, _layers, _replace

RANK, ROOM, WIDTH = 3, 8, 5
PARTS = {"qkv_proj": {"q_proj": 6, "k_proj": 2, "v_proj": 2}, "o_proj": {"o_proj": 5}}


class Module:
    """A layer of an engine, cut over ``tp_size`` workers by its rows; this is the last."""

    def __init__(self, sizes: list[int], tp_size: int) -> None:
        self.tp_size = tp_size
        self.lora_a_stacked = tuple(torch.zeros(1, 1, ROOM, WIDTH) for _ in sizes)
        self.lora_b_stacked = tuple(torch.zeros(1, 1, size // tp_size, ROOM) for size in sizes)
        self.takes_over = True

    def slice_lora_a(self, a: Any) -> Any:
        return a

    def slice_lora_b(self, b: Any) -> Any:
        if isinstance(b, list):
            return [each if each is None else self.slice_lora_b(each) for each in b]
        return b[-(len(b) // self.tp_size) :]

    def set_lora(self, a: list[Any], b: list[Any]) -> None:
        if self.takes_over:
            for stacked, given in ((self.lora_a_stacked, a), (self.lora_b_stacked, self.slice_lora_b(b))):
                for held, each in zip(stacked, given, strict=True):
                    held[:] = 0
                    if each is not None:
                        held[0, 0, : each.shape[0], : each.shape[1]] = each


class Manager:
    """The part of vLLM's manager that the loader uses; it skips the adapter of ``forgotten``."""

    def __init__(self, tp_size: int = 1) -> None:
        self.modules = {
            name: Module(list(parts.values()), tp_size if len(parts) > 1 else 1) for name, parts in PARTS.items()
        }
        self.packed_modules = {"qkv_proj": list(PARTS["qkv_proj"])}
        self.lora_index_to_id: list[int | None] = [None]
        self.registered: Any = None
        self.forgotten = ""

    def add_adapter(self, lora: Any) -> None:
        assert self.registered is None
        self.registered = lora

    def activate_adapter(self, id: int) -> None:
        self.lora_index_to_id = [id]
        loras = {name: lora for name, lora in self.registered.loras.items() if name != self.forgotten}
        for name, module in self.modules.items():
            found = [loras.get(part) for part in PARTS[name]]
            module.set_lora([lora and lora.lora_a for lora in found], [lora and lora.lora_b for lora in found])

    def remove_adapter(self, id: int) -> None:
        assert id == ADAPTER_ID
        self.lora_index_to_id, self.registered = [None], None


def layers(*without: str) -> Any:
    torch.manual_seed(1)
    tensors = []
    for part, size in {**PARTS["qkv_proj"], **PARTS["o_proj"]}.items():
        for end, shape in (("A", (RANK, WIDTH)), ("B", (size, RANK))):
            if part not in without:
                tensors.append((f"base_model.model.{part}.lora_{end}.weight", torch.randn(shape)))
    return _layers(tensors, None, 0.5, torch.float32)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_adapter_arrives_and_replaces_the_one_before(tp_size):
    manager = Manager(tp_size)
    for without in ([], ["k_proj"], ["o_proj"]):
        published = layers(*without)
        _replace(manager, published)
        assert manager.lora_index_to_id == [ADAPTER_ID]
        assert manager.registered.loras.keys() == published.keys()


def forget(manager: Manager) -> None:
    manager.forgotten = "k_proj"


def leave(manager: Manager) -> None:
    """A slice still has its earlier content."""
    manager.modules["o_proj"].takes_over = False
    manager.modules["o_proj"].lora_b_stacked[0][:] = 1.0


def merge(manager: Manager) -> None:
    """Three layers of the checkpoint in two slices."""
    module = manager.modules["qkv_proj"]
    module.lora_a_stacked, module.lora_b_stacked = module.lora_a_stacked[:2], module.lora_b_stacked[:2]
    module.takes_over = False


@pytest.mark.parametrize(
    ("breaks", "without", "reported"),
    [
        (forget, [], r"1 layers: \['k_proj'\]"),
        (leave, ["o_proj"], r"1 layers: \['o_proj'\]"),
        (leave, [], r"1 layers: \['o_proj'\]"),
        (merge, [], r"3 layers: \['k_proj', 'q_proj', 'v_proj'\]"),
    ],
)
def test_missing_tensors_are_named_and_nothing_is_left(breaks, without, reported):
    manager = Manager()
    _replace(manager, layers())
    breaks(manager)
    with pytest.raises(RuntimeError, match=reported):
        _replace(manager, layers(*without))
    assert manager.lora_index_to_id == [None]
    assert manager.registered is None


def test_models_without_adapter_support_are_refused_by_name_before_the_start():
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    _require_lora_support({"architectures": ["Qwen2ForCausalLM", "NobodysForCausalLM"]})
    with pytest.raises(ConfigError, match=r"model\.path: vLLM's GPT2LMHeadModel takes no adapters; set lora\.publish"):
        _require_lora_support({"architectures": ["GPT2LMHeadModel"]})
    for architecture in _TEXT_GENERATION_MODELS:
        try:
            takes_none = not supports_lora(ModelRegistry.models[architecture].load_model_cls())
        except ImportError:
            # From a package that is not installed here, as torchvision.
            takes_none = False
        assert takes_none == (architecture in WITHOUT_ADAPTERS), architecture

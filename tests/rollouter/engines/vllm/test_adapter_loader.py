"""The worker's loading of an adapter, over a manager of adapters that forgets things as vLLM's would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.preflight.model import WITHOUT_ADAPTERS
from asyncrl.rollouter.engines.vllm.adapter import _require_lora_support
from asyncrl.rollouter.engines.vllm.worker.lora import ADAPTER_ID, _layers, _replace

RANK, ROOM, WIDTH = 3, 8, 5
SIZES = {"qkv_proj": (6, 2, 2), "o_proj": (5,)}
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}


class Module:
    """A layer of an engine, cut over ``tp_size`` workers by its rows, of which this is the last."""

    def __init__(self, sizes: tuple[int, ...], tp_size: int) -> None:
        self.tp_size = tp_size
        self.lora_a_stacked = tuple(torch.zeros(1, 1, ROOM, WIDTH) for _ in sizes)
        self.lora_b_stacked = tuple(torch.zeros(1, 1, size // tp_size, ROOM) for size in sizes)

    def slice_lora_a(self, a: Any) -> Any:
        return a

    def slice_lora_b(self, b: Any) -> Any:
        if isinstance(b, list):
            return [each if each is None else self.slice_lora_b(each) for each in b]
        return b[-(len(b) // self.tp_size) :]

    def set_lora(self, a: list[Any], b: list[Any]) -> None:
        for index, pair in enumerate(zip(a, b, strict=True)):
            for held, given in zip((self.lora_a_stacked[index], self.lora_b_stacked[index]), pair, strict=True):
                held[:] = 0
                if given is not None:
                    cut = given if held is self.lora_a_stacked[index] else self.slice_lora_b(given)
                    held[0, 0, : cut.shape[0], : cut.shape[1]] = cut


@dataclass
class Manager:
    """As far as the loader uses vLLM's."""

    tp_size: int = 1
    forgotten: set[str] = field(default_factory=set)
    """Layers whose adapter is passed over."""

    def __post_init__(self) -> None:
        self.modules = {name: Module(sizes, self.tp_size) for name, sizes in SIZES.items()}
        self.packed_modules = {name: parts for name, parts in PARTS.items() if len(parts) > 1}
        self.lora_index_to_id: list[int | None] = [None]
        self.registered: Any = None

    def add_adapter(self, lora: Any) -> None:
        assert self.registered is None
        self.registered = lora

    def activate_adapter(self, id: int) -> None:
        self.lora_index_to_id = [id]
        loras = {name: lora for name, lora in self.registered.loras.items() if name not in self.forgotten}
        for name, module in self.modules.items():
            found = [loras.get(part) for part in PARTS[name]]
            module.set_lora([lora and lora.lora_a for lora in found], [lora and lora.lora_b for lora in found])

    def remove_adapter(self, id: int) -> None:
        assert id == ADAPTER_ID
        self.lora_index_to_id, self.registered = [None], None


def layers(*without: str, scaling: float = 0.5) -> Any:
    torch.manual_seed(1)
    tensors = []
    for name, sizes in SIZES.items():
        for part, size in zip(PARTS[name], sizes, strict=True):
            if part not in without:
                tensors.append((f"base_model.model.{part}.lora_A.weight", torch.randn(RANK, WIDTH)))
                tensors.append((f"base_model.model.{part}.lora_B.weight", torch.randn(size, RANK)))
    return _layers(tensors, None, scaling, torch.float32)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_adapter_arrives_and_replaces_the_one_before(tp_size):
    manager = Manager(tp_size)
    manager.modules["o_proj"].tp_size = 1
    manager.modules["o_proj"].lora_b_stacked = (torch.zeros(1, 1, 5, ROOM),)
    for without in ([], ["k_proj"], ["o_proj"]):
        published = layers(*without)
        _replace(manager, published)
        assert manager.lora_index_to_id == [ADAPTER_ID]
        assert manager.registered.loras.keys() == published.keys()


def _forget(manager: Manager) -> None:
    manager.forgotten = {"k_proj"}


def _leave(manager: Manager) -> None:
    """A slice without an adapter holds what was there before."""
    manager.modules["o_proj"].set_lora = lambda a, b: None
    manager.modules["o_proj"].lora_b_stacked[0][:] = 1.0


def _merge(manager: Manager) -> None:
    """Three layers of the checkpoint in two slices."""
    module = manager.modules["qkv_proj"]
    module.lora_a_stacked, module.lora_b_stacked = module.lora_a_stacked[:2], module.lora_b_stacked[:2]
    module.set_lora = lambda a, b: None


@pytest.mark.parametrize(
    ("breaks", "without", "told"),
    [
        (_forget, [], r"1 layers: \['k_proj'\]"),
        (_leave, ["o_proj"], r"1 layers: \['o_proj'\]"),
        (_leave, [], r"1 layers: \['o_proj'\]"),
        (_merge, [], r"3 layers: \['k_proj', 'q_proj', 'v_proj'\]"),
    ],
)
def test_what_did_not_arrive_is_named_and_nothing_is_left(breaks, without, told):
    manager = Manager()
    _replace(manager, layers())
    breaks(manager)
    with pytest.raises(RuntimeError, match=told):
        _replace(manager, layers(*without))
    assert manager.lora_index_to_id == [None]
    assert manager.registered is None


def test_models_whose_class_takes_no_adapters_are_refused_by_name():
    _require_lora_support({"architectures": ["Qwen2ForCausalLM"]})
    _require_lora_support({"architectures": ["NobodysForCausalLM"]})
    with pytest.raises(ConfigError, match=r"model\.path: vLLM's GPT2LMHeadModel takes no adapters; set lora\.publish"):
        _require_lora_support({"architectures": ["GPT2LMHeadModel"]})


def test_the_classes_that_preflight_refuses_are_those_of_vllm():
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    found = set()
    for architecture in _TEXT_GENERATION_MODELS:
        try:
            known = ModelRegistry.models[architecture].load_model_cls()
        except ImportError:
            # Of a package that is not installed here, as torchvision.
            assert architecture not in WITHOUT_ADAPTERS
            continue
        if not supports_lora(known):
            found.add(architecture)
    assert found == set(WITHOUT_ADAPTERS)

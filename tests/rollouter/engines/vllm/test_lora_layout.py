"""The headers of a model folder decide which adapters a version must hold. A wrong set is refused with its reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import WeightsCorrupt
from asyncrl.rollouter.engines.vllm.model_folder import check_adapters, targets
from asyncrl.weights.lora import tensor_names

LAYERS = {
    **{f"model.layers.{index}.self_attn.q_proj": (12, 8) for index in range(2)},
    **{f"model.layers.{index}.mlp.down_proj": (8, 20) for index in range(2)},
}
OTHERS = {"model.embed_tokens": (30, 8), "lm_head": (30, 8), "vision.blocks.0.q_proj": (4, 4)}
RANK = 4
A, B = tensor_names("model.layers.1.mlp.down_proj")
BELOW_A, BELOW_B = tensor_names("model.layers.2.mlp.down_proj")


@pytest.fixture
def folder(tmp_path):
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in (LAYERS | OTHERS).items()}
    tensors |= {"model.norm.weight": torch.zeros(8), "model.layers.0.self_attn.q_proj.bias": torch.zeros(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    return str(tmp_path)


def adapters(*ends):
    """Shapes of the adapters of all layers, or of those whose names end so."""
    found = {}
    for name, (out, into) in LAYERS.items():
        if not ends or name.endswith(ends):
            a, b = tensor_names(name)
            found |= {a: (RANK, into), b: (out, RANK)}
    return found


def check(shapes, folder, **lora):
    layout = {name: ("float32", shape) for name, shape in shapes.items() if shape is not None}
    check_adapters(SimpleNamespace(version=3, layout=layout), folder, LoraConfig(rank=RANK, **lora))


def test_whole_sets_of_adapters_are_accepted(folder):
    check(adapters(), folder)
    check(adapters("q_proj"), folder)
    check(adapters("q_proj"), folder, targets=["self_attn.q_proj"])
    check(adapters("1.mlp.down_proj", "q_proj"), folder, targets=["q_proj", "layers.1.mlp.down_proj"])


@pytest.mark.parametrize(
    ("change", "lora", "reported"),
    [
        ({A: None}, {}, "1 of 8 parameters are missing"),
        ({A: None, B: None}, {}, "2 of 8 parameters are missing"),
        ({A: (RANK + 1, 20), B: (8, RANK + 1)}, {}, "2 parameters have changed"),
        ({A: (RANK, 8)}, {}, "1 parameters have changed"),
        ({BELOW_A: (RANK, 20), BELOW_B: (8, RANK)}, {}, "unknown"),
        ({"model.norm.weight": (8,)}, {}, "model.norm.weight is no name of an adapter's tensor"),
        ({A.removeprefix("base_model.model."): (RANK, 20)}, {}, "is no name of an adapter's tensor"),
        (dict.fromkeys(adapters()), {}, "it holds no adapter"),
        ({}, {"targets": ["q_proj"]}, "4 parameters are unknown"),
        ({}, {"targets": ["q_proj", "down_proj", "up_proj"]}, "no layer of lora.targets = 'up_proj' has an adapter"),
    ],
)
def test_incomplete_sets_of_adapters_are_refused(folder, change, lora, reported):
    with pytest.raises(WeightsCorrupt, match=reported):
        check(adapters() | change, folder, **lora)


def test_an_adapter_without_a_configuration_is_checked_for_rank_and_pairs(tmp_path):
    check(adapters(), str(tmp_path))
    for change in ({A: None}, {A: (RANK + 1, 20)}):
        with pytest.raises(WeightsCorrupt):
            check(adapters() | change, str(tmp_path))


def test_only_layers_of_the_decoder_may_have_an_adapter(folder, tmp_path):
    everywhere = LoraConfig(rank=RANK)
    assert targets(everywhere, folder) == ["down_proj", "q_proj"]
    assert targets(LoraConfig(rank=RANK, targets=["self_attn.q_proj"]), folder) == ["q_proj"]
    assert targets(everywhere, str(tmp_path / "none")) is None

"""Adapters (LoRA) that a version must hold, by the headers of the model's files.

vLLM takes what it is given: a layer that is missing or has another's name would be computed without an adapter, and
vLLM would report nothing.

Fails with WeightsCorrupt, before anything is handed to an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import WeightsCorrupt
from asyncrl.rollouter.engines.vllm.checkpoint import weight_shapes
from asyncrl.weights.held_version import HeldVersion, Layout, check_complete
from asyncrl.weights.lora import layer_of, tensor_names

_INDEX = re.compile(r"\.\d+\.")


def targets(lora: LoraConfig, folder: str) -> list[str] | None:
    """Last parts of the names of the layers that may have an adapter; None where the folder does not say."""
    if lora.targets != "all-linear":
        return sorted({_last(target) for target in lora.targets})
    linear = _linear(folder)
    return None if linear is None else sorted({_last(name) for name in linear if _INDEX.search(name)})


def check_adapters(staged: HeldVersion, folder: str, lora: LoraConfig) -> None:
    """Raise WeightsCorrupt unless ``staged`` has nothing but adapters of lora.rank, whole and on layers of the model.

    Layers are alike where nothing but numbers in their names differ: of those that fit lora.targets, either all have an
    adapter or none. A folder without safetensors files does not say what layers there are.
    """
    layers = _layers(staged.layout, staged.version)
    linear = _linear(folder)
    if linear is None:
        linear = {layer: _shape(staged.layout, layer) for layer in layers}
    kinds = {_INDEX.sub(".N.", layer) for layer in layers}
    if lora.targets != "all-linear":
        for target in lora.targets:
            if not any(_fits(layer, target) for layer in layers):
                raise WeightsCorrupt(f"no layer of lora.targets = {target!r} has an adapter", version=staged.version)
        linear = {layer: shape for layer, shape in linear.items() if any(_fits(layer, each) for each in lora.targets)}
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer, (out, into) in linear.items():
        if _INDEX.sub(".N.", layer) in kinds:
            a, b = tensor_names(layer)
            expected |= {a: ("adapter", (lora.rank, into)), b: ("adapter", (out, lora.rank))}
    check_complete(staged.version, staged.layout, expected, dtypes=False)


def _layers(layout: Layout, version: int) -> list[str]:
    found = {name: layer_of(name) for name in layout}
    if foreign := sorted(name for name, layer in found.items() if layer is None):
        raise WeightsCorrupt(f"{foreign[0]} is no name of an adapter's tensor", version=version)
    if not found:
        raise WeightsCorrupt("it holds no adapter", version=version)
    return sorted({layer[0] for layer in found.values() if layer is not None})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fits(layer: str, target: str) -> bool:
    # By whole parts of the name: proj is no end of q_proj.
    return f".{layer}".endswith(f".{target}")


def _shape(layout: Layout, layer: str) -> tuple[int, int]:
    """Shape of a layer, [out, in], by the adapter itself; zeros where that is not whole."""
    (_, a), (_, b) = (layout.get(name, ("", (0, 0))) for name in tensor_names(layer))
    return (b[0] if b else 0, a[-1] if a else 0)


def _linear(folder: str) -> Mapping[str, tuple[int, int]] | None:
    """Matrices of the model's files by the name of their layer: [out, in]."""
    shapes = weight_shapes(folder)
    if shapes is None:
        return None
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, (_, shape) in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }

"""Loads versions that are adapters (LoRA) into the model of a vLLM worker.

All requests of an engine use one adapter, ADAPTER_ID. An update replaces its matrices; the base model does not change.
The engine has compared names and shapes with the model's folder (``VllmEngine.accept``). But vLLM silently ignores
adapters of layers that it does not know. So an update first checks that vLLM knows each layer. Afterwards it compares
the buffers with which the layers compute with the published matrices.

Fails with RuntimeError. The engine then has the previous adapter or none, and must not step until an update succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from asyncrl.messages.weights import Manifest
from asyncrl.weights.tensors import tensors_of

ADAPTER_ID = 1


def load_adapter(model: Any, manifest: Manifest, scaling: float) -> None:
    """Replace the adapter by a version whose paths this process can open; ``scaling`` is alpha / rank."""
    mapper, manager = getattr(model, "hf_to_vllm_mapper", None), model.lora_manager
    renaming = mapper.get_rename_mapper() if mapper is not None else None
    _replace(manager, _layers(tensors_of(manifest), renaming, scaling, manager.lora_config.lora_dtype))
    if current_platform.is_cpu():
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        assert manager.lora_slots == 1, "all requests have the same adapter"
        PunicaWrapperCPU.add_lora_linear = _add_adapter  # type: ignore[assignment,method-assign]


def _layers(
    tensors: Iterable[tuple[str, torch.Tensor]], mapper: Any, scaling: float, dtype: torch.dtype
) -> dict[str, LoRALayerWeights]:
    """Copy the published matrices a [rank, in] and b [out, rank], by vLLM's names, which ``mapper`` makes.

    b is multiplied by the scaling in float32; both are then of ``dtype``.
    """
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        layer, is_a = parse_fine_tuned_lora_name(name, mapper)
        if is_a:
            a[layer] = tensor.to(dtype, copy=True)
        else:
            b[layer] = (tensor.float() * scaling).to(dtype)
    return {layer: LoRALayerWeights(layer, len(own), len(own), own, b[layer], scaling=1.0) for layer, own in a.items()}


def _replace(manager: Any, layers: dict[str, LoRALayerWeights]) -> None:
    """Replace the adapter of vLLM's LoRAModelManager, and check that each layer took its matrices."""
    known = {layer for module in manager.modules for layer in _layers_of(manager, module)}
    if unknown := sorted(layers.keys() - known):
        raise RuntimeError(f"vLLM has no place for adapters on {len(unknown)} of {len(layers)} layers: {unknown[:3]}")
    rank = next(iter(layers.values())).rank
    manager.remove_adapter(ADAPTER_ID)
    try:
        # vLLM changes the dictionary that it gets.
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, dict(layers)))
        manager.activate_adapter(ADAPTER_ID)
        if differing := sorted(_differing_layers(manager, layers)):
            raise RuntimeError(f"vLLM did not take over the adapters of {len(differing)} layers: {differing[:3]}")
    except BaseException:
        manager.remove_adapter(ADAPTER_ID)
        raise


def _layers_of(manager: Any, module: str) -> list[str]:
    """List the layers of the checkpoint that a module computes, as slices: q_proj, k_proj and v_proj, for example."""
    return manager.packed_modules.get(module) or [module]


def _differing_layers(manager: Any, layers: dict[str, LoRALayerWeights]) -> Iterator[str]:
    """Yield the layers whose buffers differ from the published matrices, or from zeros if the layer has no adapter."""
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    for module_name, module in manager.modules.items():
        names = _layers_of(manager, module_name)
        held = list(zip(_slices(module.lora_a_stacked), _slices(module.lora_b_stacked), strict=True))
        published = [layers.get(name) for name in names]
        a = [own.lora_a if own else None for own in published]
        b = [own.lora_b if own else None for own in published]
        if len(held) != len(names):
            # The module has more or fewer slices than layers, so it is unknown which slice belongs to which layer.
            yield from (name for name in names if name in layers)
            continue
        if getattr(module, "tp_size", 1) > 1 and any(published):
            # This worker has a part of each matrix.
            if len(names) > 1:
                a, b = module.slice_lora_a(a), module.slice_lora_b(b)
            else:
                a, b = [module.slice_lora_a(a[0])], [module.slice_lora_b(b[0])]
        for name, (held_a, held_b), own_a, own_b in zip(names, held, a, b, strict=True):
            if not (_holds(held_a[slot, 0], own_a) and _holds(held_b[slot, 0], own_b)):
                yield name


def _slices(stacked: Any) -> tuple[torch.Tensor, ...]:
    """Return the buffers of a module, one for each slice; a single one may come without a tuple."""
    return stacked if isinstance(stacked, tuple) else (stacked,)


def _holds(held: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether a buffer holds a matrix in its first rows and columns. ``expected`` None: whether the buffer is zero."""
    if expected is None:
        return not held.any()
    rows, columns = expected.shape
    return bool(torch.equal(held[:rows, :columns], expected.to(held.device)))


def _add_adapter(
    _wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """On CPU, add ``scale`` x aᵀ bᵀ of the one adapter to y, slice by slice, for all tokens at once.

    vLLM's own arithmetic, made for many adapters, copies both matrices for each token before it multiplies. That takes
    several times as long as the layer itself.

    y: [T, the sum of output_slices]; x: [T, in]; each a: [1, 1, rank, in]; each b: [1, 1, out, rank].
    """
    start = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size].addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)
        start += size

"""The worker's side of an update that brings adapters (LoRA) alone: an extension of vLLM's worker.

It runs in vLLM's worker processes. Every request of an engine goes with the one adapter ADAPTER_ID. An update replaces
what that adapter holds, straight from sealed memory, which the engine's owner has verified and holds open; the base
model is not touched. vLLM passes over adapters of layers that it does not know, and says nothing: so the layers are
looked up before the load, and afterwards what the layers compute with is compared with what was published.

Either the adapter is whole afterwards, or ``load_adapter`` raises RuntimeError and the engine has none: a step would
end it, so it must not be stepped until an update has succeeded. Any number of failed updates may come before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from asyncrl.messages.weights import Manifest
from asyncrl.rollouter.engines.vllm.buckets import tensors_of

ADAPTER_ID = 1


class AdapterLoader:
    """Mixed into vLLM's worker (worker_extension_cls): its methods are remote calls."""

    model_runner: Any

    def load_adapter(self, manifest: str, scaling: float) -> None:
        """Replace the adapter by the version of ``manifest``, a Manifest as JSON with paths that this process can open.

        ``scaling`` is alpha / rank. Raises RuntimeError where a tensor did not arrive, and what vLLM raises.
        """
        model = self.model_runner.get_model()
        version = msgspec.json.decode(manifest, type=Manifest)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        layers = _layers(tensors_of(version), mapper and mapper.get_rename_mapper(), scaling)
        _replace(model.lora_manager, layers)
        # The bytes may be gone after the load.
        torch.accelerator.synchronize()


@dataclass(slots=True)
class _Layer:
    """The adapter of a linear layer: it adds b a x. a: [rank, in]; b: [out, rank]."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None


def _layers(tensors: Iterable[tuple[str, torch.Tensor]], mapper: Any, scaling: float) -> dict[str, _Layer]:
    """By vLLM's names, in memory of their own. The scaling is applied in float32."""
    found: dict[str, _Layer] = {}
    for name, tensor in tensors:
        layer, is_a = parse_fine_tuned_lora_name(name, mapper)
        if is_a:
            found.setdefault(layer, _Layer()).a = tensor.clone()
        else:
            found.setdefault(layer, _Layer()).b = (tensor.float() * scaling).to(tensor.dtype)
    return found


def _replace(manager: Any, layers: dict[str, _Layer]) -> None:
    homes = _homes(manager)
    if unknown := sorted(layers.keys() - homes.keys()):
        raise RuntimeError(f"vLLM has no place for adapters on {len(unknown)} of {len(layers)} layers: {unknown[:3]}")
    if halves := sorted(name for name, layer in layers.items() if layer.a is None or layer.b is None):
        raise RuntimeError(f"only one of two matrices came for {halves[:3]}")
    ranks = {len(layer.a) for layer in layers.values() if layer.a is not None}
    if len(ranks) != 1:
        raise RuntimeError(f"the adapters have the ranks {sorted(ranks)}, and not one and the same")
    (rank,) = ranks
    dtype = manager.lora_config.lora_dtype
    loras = {}
    for name, layer in layers.items():
        layer.a, layer.b = layer.a.to(dtype), layer.b.to(dtype)
        loras[name] = LoRALayerWeights(name, rank, rank, layer.a, layer.b, scaling=1.0)
    manager.remove_adapter(ADAPTER_ID)
    try:
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        manager.activate_adapter(ADAPTER_ID)
        if absent := sorted(_absent(manager, homes, layers)):
            raise RuntimeError(f"vLLM did not take over the adapters of {len(absent)} layers: {absent[:3]}")
    except BaseException:
        manager.remove_adapter(ADAPTER_ID)
        raise


def _homes(manager: Any) -> dict[str, tuple[str, int]]:
    """The module of vLLM's model, and the slice of it, in which each of the checkpoint's layers is computed."""
    found = {}
    for module in manager.modules:
        for index, layer in enumerate(manager.packed_modules.get(module) or [module]):
            found[layer] = (module, index)
    return found


def _absent(manager: Any, homes: dict[str, tuple[str, int]], layers: dict[str, _Layer]) -> Iterable[str]:
    """Layers whose buffers do not hold what was published; nothing but zeros where nothing was."""
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    parts: dict[str, dict[int, str]] = {}
    for layer, (module, index) in homes.items():
        parts.setdefault(module, {})[index] = layer
    for name, module in manager.modules.items():
        names = parts[name]
        held_a, held_b = _slices(module.lora_a_stacked), _slices(module.lora_b_stacked)
        if len(held_a) != len(names):
            # It computes fewer or more layers than the checkpoint has, so nobody can say where which lies.
            yield from (layer for layer in names.values() if layer in layers)
            continue
        expected_a, expected_b = [[getattr(layers.get(names[i]), m, None) for i in range(len(names))] for m in "ab"]
        if getattr(module, "tp_size", 1) > 1:
            expected_a, expected_b = _shard(module, expected_a, expected_b)
        for index, layer in names.items():
            pairs = ((held_a[index][slot, 0], expected_a[index]), (held_b[index][slot, 0], expected_b[index]))
            if not all(_holds(held, expected) for held, expected in pairs):
                yield layer


def _slices(stacked: Any) -> tuple[torch.Tensor, ...]:
    return stacked if isinstance(stacked, tuple) else (stacked,)


def _shard(module: Any, a: list[Any], b: list[Any]) -> tuple[list[Any], list[Any]]:
    """This worker's parts of the matrices, as the module itself takes them."""
    if len(a) > 1:
        return module.slice_lora_a(a), module.slice_lora_b(b)
    if a[0] is None:
        return a, b
    return [module.slice_lora_a(a[0])], [module.slice_lora_b(b[0])]


def _holds(held: torch.Tensor, expected: torch.Tensor | None) -> bool:
    if expected is None:
        return not held.any()
    rows, columns = expected.shape
    return bool(torch.equal(held[:rows, :columns], expected.to(held.device)))

"""Loads versions that are adapters (LoRA) in vLLM's worker processes, as an extension of vLLM's worker.

All requests of an engine use one adapter, ADAPTER_ID. An update replaces its matrices from shared memory, which the
rollouter has verified and keeps open. The base model does not change. vLLM silently ignores adapters of layers that it
does not know. So an update first checks that vLLM knows each layer. Afterwards it compares the buffers with which
the layers compute with the published matrices.

After an update the adapter is complete, or ``load_adapter`` returns the reason of the failure. After a failure the
engine has the previous adapter or none, and must not step until an update succeeds. An update may follow any number of
failed ones. weights.py says why a failure is returned and not raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from asyncrl.messages.weights import Manifest
from asyncrl.weights.tensors import tensors_of

ADAPTER_ID = 1
Matrices = tuple[torch.Tensor, torch.Tensor]
"""Matrices a [rank, in] and b [out, rank] of an adapter: the layer adds b a x to its output for x."""


class AdapterLoader:
    """Methods that vLLM adds to its worker (worker_extension_cls); the engine calls them remotely."""

    model_runner: Any

    def load_adapter(self, manifest: str, scaling: float) -> str:
        """Replace the adapter by the version of ``manifest``, a Manifest as JSON with paths that this process can open.

        ``scaling`` is alpha / rank. Returns the reason of a failure, "" after a success.
        """
        try:
            self._load_adapter(manifest, scaling)
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _load_adapter(self, manifest: str, scaling: float) -> None:
        """As ``load_adapter``, but raises the errors."""
        model = self.model_runner.get_model()
        version = msgspec.json.decode(manifest, type=Manifest)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        manager = model.lora_manager
        renaming = mapper.get_rename_mapper() if mapper is not None else None
        _replace(manager, _layers(tensors_of(version), renaming, scaling, manager.lora_config.lora_dtype))
        if current_platform.is_cpu():
            from asyncrl.rollouter.engines.vllm.worker.cpu_lora import compute_at_once

            compute_at_once(manager)
        torch.accelerator.synchronize()


def _layers(
    tensors: Iterable[tuple[str, torch.Tensor]], mapper: Any, scaling: float, dtype: torch.dtype
) -> dict[str, Matrices]:
    """Copy the published matrices, by vLLM's names of the layers; ``mapper`` renames them.

    b is multiplied by the scaling in float32; both are then of ``dtype``. Raises RuntimeError if a layer has only one.
    """
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        layer, is_a = parse_fine_tuned_lora_name(name, mapper)
        if is_a:
            a[layer] = tensor.to(dtype, copy=True)
        else:
            b[layer] = (tensor.float() * scaling).to(dtype)
    if halves := sorted(a.keys() ^ b.keys()):
        raise RuntimeError(f"only one of two matrices came for {halves[:3]}")
    return {layer: (a[layer], b[layer]) for layer in a}


def _replace(manager: Any, layers: dict[str, Matrices]) -> None:
    """Replace the adapter of vLLM's LoRAModelManager, and check that each layer took its matrices.

    Raises RuntimeError. After an unknown layer or several ranks the previous adapter stays; after any later error the
    engine has none.
    """
    modules = _modules_of_layers(manager)
    if unknown := sorted(layers.keys() - modules.keys()):
        raise RuntimeError(f"vLLM has no place for adapters on {len(unknown)} of {len(layers)} layers: {unknown[:3]}")
    ranks = {len(a) for a, _ in layers.values()}
    if len(ranks) != 1:
        raise RuntimeError(f"the adapters have the ranks {sorted(ranks)}, and not one and the same")
    (rank,) = ranks
    loras = {name: LoRALayerWeights(name, rank, rank, a, b, scaling=1.0) for name, (a, b) in layers.items()}
    manager.remove_adapter(ADAPTER_ID)
    try:
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        manager.activate_adapter(ADAPTER_ID)
        if differing := sorted(_differing_layers(manager, modules, layers)):
            raise RuntimeError(f"vLLM did not take over the adapters of {len(differing)} layers: {differing[:3]}")
    except BaseException:
        manager.remove_adapter(ADAPTER_ID)
        raise


def _modules_of_layers(manager: Any) -> dict[str, str]:
    """Return the module of vLLM's model that computes each layer of the checkpoint.

    One module may compute several layers, such as q_proj, k_proj and v_proj, as slices in this order.
    """
    return {layer: module for module in manager.modules for layer in manager.packed_modules.get(module) or [module]}


def _differing_layers(manager: Any, modules: dict[str, str], layers: dict[str, Matrices]) -> Iterator[str]:
    """Yield the layers whose buffers differ from the published matrices, or from zeros if the layer has no adapter.

    ``modules`` has the module of each layer.
    """
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    parts: dict[str, list[str]] = {}
    for layer, module in modules.items():
        parts.setdefault(module, []).append(layer)
    for name, module in manager.modules.items():
        names = parts[name]
        held = list(zip(_slices(module.lora_a_stacked), _slices(module.lora_b_stacked), strict=True))
        if len(held) != len(names):
            # The module has more or fewer slices than layers, so it is unknown which slice belongs to which layer.
            yield from (layer for layer in names if layer in layers)
            continue
        published = [layers.get(layer, (None, None)) for layer in names]
        for layer, (held_a, held_b), (a, b) in zip(names, held, _shard(module, published), strict=True):
            if not (_holds(held_a[slot, 0], a) and _holds(held_b[slot, 0], b)):
                yield layer


def _shard(module: Any, published: list[Any]) -> list[Any]:
    """Cut the matrices of a module's layers as tensor parallelism does; returns the parts of this worker.

    A layer without an adapter has None for both matrices.
    """
    a, b = [a for a, _ in published], [b for _, b in published]
    if getattr(module, "tp_size", 1) == 1 or not any(each is not None for each in a):
        return published
    if len(published) > 1:
        return list(zip(module.slice_lora_a(a), module.slice_lora_b(b), strict=True))
    return [(module.slice_lora_a(a[0]), module.slice_lora_b(b[0]))]


def _slices(stacked: Any) -> tuple[torch.Tensor, ...]:
    return stacked if isinstance(stacked, tuple) else (stacked,)


def _holds(held: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether a buffer holds a matrix in its first rows and columns. ``expected`` None: whether the buffer is zero."""
    if expected is None:
        return not held.any()
    rows, columns = expected.shape
    return bool(torch.equal(held[:rows, :columns], expected.to(held.device)))

"""The names of an adapter's tensors, and its adapter_config.json, in PEFT's format. Pure.

Learner, engines and exports use the same names. The adapter of the linear layer ``NAME`` [out, in] is two matrices:
``base_model.model.NAME.lora_A.weight`` [rank, in] and ``base_model.model.NAME.lora_B.weight`` [out, rank]
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # A host checks its model before it has the configuration of the run.
    from asyncrl.config.algorithm import LoraConfig

PREFIX = "base_model.model."
ADAPTER_FILE, SETTINGS_FILE = "adapter_model.safetensors", "adapter_config.json"


def tensor_names(layer: str) -> tuple[str, str]:
    """Return the published names of the matrices A and B of a layer, given the layer's name in the model."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def layer_of(tensor: str) -> tuple[str, str] | None:
    """Return the layer's name, and "A" or "B", for a tensor's published name; None if it is not an adapter's."""
    for matrix in ("A", "B"):
        suffix = f".lora_{matrix}.weight"
        if tensor.startswith(PREFIX) and tensor.endswith(suffix):
            return tensor[len(PREFIX) : -len(suffix)], matrix
    return None


def adapter_settings(lora: LoraConfig, *, model: str, targets: Iterable[str]) -> dict[str, Any]:
    """Return the content of adapter_config.json for adapters on the model in folder ``model``.

    ``targets`` are the ends of the names of the layers with an adapter.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(targets)),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

"""The form of an adapter outside of the learner: names of its tensors and its adapter_config.json, as PEFT has them.

Pure. Learner, engines and exports share it, so that one set of names goes all the way. The adapter of the linear layer
``NAME`` [out, in] is two matrices: ``base_model.model.NAME.lora_A.weight`` [rank, in] and
``base_model.model.NAME.lora_B.weight`` [out, rank] (https://huggingface.co/docs/peft/developer_guides/checkpoint).
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
    """Names of the matrices A and B of the layer that the model calls ``layer``."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def layer_of(tensor: str) -> tuple[str, str] | None:
    """The layer of an adapter's tensor, and "A" or "B"; None where the name is no adapter's."""
    for matrix in ("A", "B"):
        suffix = f".lora_{matrix}.weight"
        if tensor.startswith(PREFIX) and tensor.endswith(suffix):
            return tensor[len(PREFIX) : -len(suffix)], matrix
    return None


def adapter_settings(lora: LoraConfig, *, model: str, targets: Iterable[str]) -> dict[str, Any]:
    """adapter_config.json of adapters on layers whose names end in ``targets``, over the model folder ``model``."""
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

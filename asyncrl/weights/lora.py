"""The names of an adapter's tensors and files, in PEFT's format. Pure.

Learner, engines and exports use the same names. The adapter of the linear layer ``NAME`` [out, in] is two matrices:
``base_model.model.NAME.lora_A.weight`` [rank, in] and ``base_model.model.NAME.lora_B.weight`` [out, rank]
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

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

"""The weights in a model's folder: the files that transformers loads, and whether they can be trained.

Only the headers of safetensors files are read. An index maps each tensor to its file, so ``model.measure`` finds a
tensor that its file lacks.

Invariant: a folder passes only if it holds one whole model with weights in floating point of 16 bits or more. A .bin
file is not opened, so its tensors are not checked. Quantized weights and adapters are refused, even if a package that
reads them is installed.

Raises Unreadable for missing or damaged files, or its subclass Untrainable. The text of an error says what is wrong
with the folder, and ``fix`` says what to do. The ``fix`` of Unreadable is to copy the folder again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.core.formatting import name_some
from asyncrl.core.model_files import Tensor, Unreadable, read_json
from asyncrl.weights.lora import ADAPTER_FILE, SETTINGS_FILE

LOADED = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files that transformers looks for, in this order. It loads the first that exists.

A file that transformers_weights in config.json names comes before these.
"""
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data"),
    *(".ot", ".tflite", ".mlmodel", ".npz"),
)
"""Suffixes of files of weights."""
ADAPTERS = (SETTINGS_FILE, ADAPTER_FILE, "adapter_model.bin")
_FLOATS = ("F16", "BF16", "F32", "F64")
# In names of integer tensors that are quantized weights. Older checkpoints also have integer masks and positions.
_WEIGHT = re.compile(r"weight|packed|blocks|qzeros")


class Untrainable(Unreadable):
    """The folder's weights cannot be trained as they are, or it holds an adapter. ``fix`` says what the user can do."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Return the weight files that transformers would load, each with the tensors that the index lists for it.

    Without an index that is one file with an empty list. Raises Unreadable if a file is missing, and Untrainable if
    there are only weights of other formats or names.
    """
    config = folder / "config.json"
    chosen = read_json(config).get("transformers_weights") if config.is_file() else None
    for name in (chosen, *LOADED) if isinstance(chosen, str) else LOADED:
        if not (folder / name).is_file():
            continue
        if not name.endswith(".json"):
            return {folder / name: []}
        file_of = read_json(folder / name).get("weight_map") or {}
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise Unreadable(f"{name}: weight_map does not map each tensor to a file")
        files: dict[Path, list[str]] = {folder / file: [] for file in sorted(set(file_of.values()))}
        if missing := [file.name for file in files if not file.is_file()]:
            raise Unreadable(f"{name} names files that are missing: {name_some(missing, 4)}")
        for tensor, file in file_of.items():
            files[folder / file].append(tensor)
        if files:
            return files
    raise _no_weights_error(folder)


def check_form(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that the folder holds no adapter and that its config.json names no quantization. Raises Untrainable.

    ``settings`` is the content of config.json, empty if the folder has no such file.
    """
    if adapter_files := [name for name in ADAPTERS if (folder / name).is_file()]:
        raise _adapter_error(folder, adapter_files, alone=not any((folder / name).is_file() for name in LOADED))
    for part in (settings, settings.get("text_config"), settings.get("llm_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, Mapping) and part.get(key):
                raise _quantized_error(f"config.json has {key}: the method is {_method(part[key])}")


def check_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Check that no weight of a file is quantized. Raises Untrainable."""
    quantized = [name for name, tensor in tensors.items() if _is_quantized(name, tensor)]
    if quantized:
        first = f"{quantized[0]} is {tensors[quantized[0]].dtype}"
        raise _quantized_error(
            f"{file.name} holds {len(quantized)} tensors that are not floating point of 16 bits or more: {first}"
        )


def _is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a quantized weight: by its dtype, and for integers also by the last part of its name."""
    # C64 is a complex number.
    if tensor.dtype in _FLOATS or tensor.dtype.startswith("C"):
        return False
    # Floating point of 8 bits or fewer is F8_E4M3, F8_E5M2, F8_E8M0, F6..., F4.
    return tensor.dtype.startswith("F") or (tensor.dtype != "BOOL" and bool(_WEIGHT.search(name.rpartition(".")[2])))


def _method(quantization: Any) -> str:
    if not isinstance(quantization, Mapping):
        return "unknown"
    if method := quantization.get("quant_method") or quantization.get("quant_algo"):
        return str(method)
    return "bitsandbytes" if any(quantization.get(f"load_in_{bits}bit") for bits in (4, 8)) else "unknown"


def _quantized_error(text: str) -> Untrainable:
    return Untrainable(
        f"its weights are quantized, and asyncrl trains weights in bfloat16, float16 or float32: {text}",
        "take the release of this model that is not quantized, usually the one in bfloat16, or save a dequantized "
        "copy; transformers makes one of fp8 and mxfp4 (dequantize=True)",
    )


def _adapter_error(folder: Path, adapter_files: list[str], *, alone: bool) -> Untrainable:
    """Return the error for a folder with these files of an adapter. ``alone``: the folder holds no model."""
    base = None
    if SETTINGS_FILE in adapter_files:
        base = read_json(folder / SETTINGS_FILE).get("base_model_name_or_path")
    of_base = f" of {base}" if base else ""
    merge = "merge the adapter into its base with peft (merge_and_unload, then save_pretrained) and give that folder"
    if alone:
        return Untrainable(
            f"holds an adapter{of_base} and no model ({', '.join(adapter_files)})",
            f"{merge}; or give the folder of the base, to train it without the adapter",
        )
    return Untrainable(
        f"holds a model and an adapter{of_base} ({', '.join(adapter_files)}): the adapter would be ignored",
        f"{merge}; or move {', '.join(adapter_files)} elsewhere, to train the model without the adapter",
    )


def _no_weights_error(folder: Path) -> Unreadable:
    """Return the error for a folder without weights to load: Untrainable if it holds other weights, else Unreadable."""
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    if others := [name for name in files if name.endswith(".gguf")]:
        return Untrainable(
            f"holds its weights in GGUF only ({name_some(others, 4)}), which cannot be trained",
            "take the release of this model in Hugging Face format, with config.json and model.safetensors",
        )
    wanted = "model.safetensors or pytorch_model.bin, or the index of either"
    # These weights have another format, or the user has changed the names of their files.
    if others := [name for name in files if name.endswith(WEIGHTS)]:
        return Untrainable(
            f"holds no weights that transformers would load, which are {wanted}; it holds {name_some(others, 4)}",
            "take the release of this model in Hugging Face format, or convert it; rename files that were renamed",
        )
    return Unreadable(f"there are no weights: neither {wanted}")

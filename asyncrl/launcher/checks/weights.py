"""The weights in a model's folder: the files that transformers loads, and whether they can be trained.

Only the headers of safetensors files are read. They hold the dtype, the shape and the byte range of every tensor, which
reveals a file that was cut off. An index maps each tensor to its file; a tensor that no file holds is found too.

Invariant: a folder passes only if it holds one whole model with weights in floating point of 16 bits or more.
Quantized weights and adapters are refused, even if a package that reads them is installed.

Raises Unreadable or Untrainable, which say what the folder holds and what to do.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.launcher.checks.findings import listed
from asyncrl.weights.lora import ADAPTER_FILE, SETTINGS_FILE

# safetensors itself refuses a header of more than 100 MB.
MOST_HEADER_BYTES = 100 << 20
LOADED = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files that transformers looks for, in this order. It loads the first that exists.

A file that transformers_weights in config.json names comes before these.
"""
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".npz")
"""Suffixes of files that may hold weights, though transformers does not load them under their names."""
ADAPTERS = (SETTINGS_FILE, ADAPTER_FILE, "adapter_model.bin")
DOWNLOAD = "copy or download the whole model folder again, readable for this user"
_LENGTH = struct.Struct("<Q")
_FLOATS = ("F16", "BF16", "F32", "F64")
# In names of integer tensors that are quantized weights. Older checkpoints also have integer masks and positions.
_WEIGHT = re.compile(r"weight|packed|blocks|qzeros")


class Unreadable(ValueError):
    """A file of the model is missing or damaged."""

    fix = DOWNLOAD


class Untrainable(Unreadable):
    """The folder is whole, but asyncrl cannot train its weights. ``fix`` says what the user can do."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


class Tensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    """Name in safetensors, for example BF16."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int
    """Number of bytes."""


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Return the weight files that transformers would load, each with the tensors that the index lists for it.

    Without an index that is one file with an empty list. Raises Unreadable if a file is missing, Untrainable if all
    weights are in other formats.
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
            raise Unreadable(f"{name} names files that are missing: {listed(missing, 4)}")
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


def read_header(file: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file and return its tensors by name. Raises Unreadable or OSError.

    The file holds the header's length (8 bytes), the header (JSON) and the tensors, and nothing after them. See
    https://github.com/huggingface/safetensors, Format.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as source:
        prefix = source.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes")
        (length,) = _LENGTH.unpack(prefix)
        if length > MOST_HEADER_BYTES:
            raise Unreadable(f"{file.name} is not a safetensors file (is it a pointer of git-lfs?)")
        if length > file_bytes - _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes, and its header alone takes {length}")
        try:
            header = json.loads(source.read(length))
            descriptions = {name: entry for name, entry in header.items() if name != "__metadata__"}
            by_name = {name: _tensor(entry, _LENGTH.size + length) for name, entry in descriptions.items()}
            end = max((tensor.start + tensor.size for tensor in by_name.values()), default=_LENGTH.size + length)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreadable(f"the header of {file.name} cannot be read") from None
    if end > file_bytes:
        raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes, and its header describes {end}")
    if end < file_bytes:
        raise Unreadable(f"{file.name} has {file_bytes} bytes, and its header describes {end}")
    return by_name


def _tensor(entry: Mapping[str, Any], start: int) -> Tensor:
    """Parse an entry of a header. Its offsets count from ``start``, the end of the header."""
    begin, end = map(int, entry["data_offsets"])
    return Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, end - begin)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises Unreadable or OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise Unreadable(f"{path.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    return value


def _is_quantized(name: str, tensor: Tensor) -> bool:
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
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    if others := [name for name in files if name.endswith(".gguf")]:
        return Untrainable(
            f"holds its weights in GGUF only ({listed(others, 4)}), which cannot be trained",
            "take the release of this model in Hugging Face format, with config.json and model.safetensors",
        )
    wanted = "model.safetensors or pytorch_model.bin, or the index of either"
    if others := [name for name in files if name.endswith(OTHER_WEIGHTS)]:
        return Untrainable(
            f"holds no weights that transformers would load, which are {wanted}; it holds {listed(others, 4)}",
            "take the release of this model in Hugging Face format, or convert it; rename files that were renamed",
        )
    return Unreadable(f"there are no weights: neither {wanted}")

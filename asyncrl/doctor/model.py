"""The model's folder: readable, whole, with a tokenizer; and its size, without loading a tensor.

Of safetensors only the headers are read: they tell the shape of every tensor, and where it ends in the file, so that a
file that was cut off is found out.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

from asyncrl.config.training import ModelConfig
from asyncrl.doctor.findings import Finding, fail, ok, warn
from asyncrl.doctor.needs import ModelSize
from asyncrl.errors import ConfigError
from asyncrl.tokenizer import load_tokenizer

MOST_HEADER_BYTES = 100 << 20
BYTES_OF_DTYPE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_LENGTH = struct.Struct("<Q")


class Unreadable(ValueError):
    """What is wrong with a file of the model."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, by name. Raises Unreadable, also for one that is named and not there."""
    for kind, index in (("safetensors", "model.safetensors.index.json"), ("bin", "pytorch_model.bin.index.json")):
        if (folder / index).is_file():
            names = _read_json(folder / index).get("weight_map") or {}
            files = [folder / name for name in sorted(set(names.values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise Unreadable(f"{index} names {', '.join(missing[:4])}, and {len(missing)} of these are not there")
            if files:
                return files
        if files := sorted(file for file in folder.glob(f"*.{kind}") if file.is_file()):
            return files
    raise Unreadable("there are no weights: neither *.safetensors nor *.bin")


def measure(folder: Path) -> ModelSize:
    """Raises Unreadable or OSError."""
    parameters = size = 0
    for file in weight_files(folder):
        there = file.stat().st_size
        size += there
        if file.suffix == ".safetensors":
            parameters += count_parameters(file)
        else:
            config = _read_json(folder / "config.json")
            dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
            parameters += there // BYTES_OF_DTYPE.get(dtype, 4)
    return ModelSize(parameters=parameters, bytes=size)


def count_parameters(file: Path) -> int:
    """Of a safetensors file. Raises Unreadable or OSError."""
    there = file.stat().st_size
    with file.open("rb") as source:
        head = source.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off")
        (length,) = _LENGTH.unpack(head)
        if length > min(there, MOST_HEADER_BYTES):
            raise Unreadable(f"{file.name} is no safetensors file (is it a pointer of git-lfs?)")
        try:
            tensors = json.loads(source.read(length))
            shapes = [(entry["shape"], entry["data_offsets"][1]) for name, entry in tensors.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreadable(f"the header of {file.name} cannot be read") from None
    end = max((last for _, last in shapes), default=0) + _LENGTH.size + length
    if end > there:
        raise Unreadable(f"{file.name} is cut off: it has {there} bytes of {end}")
    return sum(math.prod(shape) for shape, _ in shapes)


def digest(folder: Path) -> str:
    """Equal where hosts have the same model: its config.json, and the names and sizes of the weights' files."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
    return found.hexdigest()


def check_model(model: ModelConfig) -> tuple[Finding, ModelSize | None]:
    """The finding, and the size if it can be told."""
    if model.path is None:
        return ok("model", "none: everything is simulated"), None
    folder = Path(model.path)
    if not folder.is_dir():
        fix = "put the model at the same place on each host, or set model.path to a folder that all see"
        return fail("model", f"{folder} is not a folder here", fix), None
    try:
        _read_json(folder / "config.json")
        size = measure(folder)
    except (OSError, Unreadable) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{folder}: {error}"
        return fail("model", told, "copy the model's folder again, as a whole and readable for this user"), None
    try:
        ends = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).eos_ids
    except ConfigError as error:
        return fail("model", "; ".join(error.problems), "copy the tokenizer's files into the model's folder"), size
    told = f"{folder}: {size.parameters:,} parameters, with a tokenizer"
    if not ends:
        fix = "name eos_token_id in config.json or generation_config.json, or set rollout.stop_token_ids"
        return warn("model", f"{told} that names no end of a sequence: responses end at rollout.max_tokens", fix), size
    return ok("model", told), size


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise Unreadable(f"{path.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    return value

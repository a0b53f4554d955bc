"""The weights in the model's folder: readable and whole; and their size, without loading a tensor.

Safetensors are read by their headers alone: they tell the shape of every tensor and where it lies in the file, so
that a file that was cut off is found out, and a tensor that the index names and no file holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.hub import fetch_advice
from asyncrl.disk import in_bytes
from asyncrl.preflight.findings import Finding, fail, listed, ok
from asyncrl.preflight.needs import ModelSize

if TYPE_CHECKING:
    # A host looks at its model before it has the configuration of the run.
    from asyncrl.config import Config
    from asyncrl.config.lora import LoraConfig

# safetensors itself refuses a header of more than 100 MB.
MOST_HEADER_BYTES = 100 << 20
BYTES_OF_DTYPE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the name of its dtype in config.json."""
KEY = "model.path"
_LENGTH = struct.Struct("<Q")


class Unreadable(ValueError):
    """A file of the model is wrong."""


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The files that hold the weights, by name, with the tensors that an index says are there.

    Raises Unreadable, also for a file that is named and not there.
    """
    for kind, index in (("safetensors", "model.safetensors.index.json"), ("bin", "pytorch_model.bin.index.json")):
        if (folder / index).is_file():
            places = _read_json(folder / index).get("weight_map") or {}
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise Unreadable(f"{index}: weight_map does not tell the file of each tensor")
            named: dict[Path, list[str]] = {folder / name: [] for name in sorted(set(places.values()))}
            if missing := [file.name for file in named if not file.is_file()]:
                raise Unreadable(f"{index} names files that are not there: {listed(missing, 4)}")
            for tensor, name in places.items():
                named[folder / name].append(tensor)
            if named:
                return named
        if files := sorted(file for file in folder.glob(f"*.{kind}") if file.is_file()):
            return {file: [] for file in files}
    raise Unreadable("there are no weights: neither *.safetensors nor *.bin")


def measure(folder: Path, lora: LoraConfig | None = None) -> ModelSize:
    """Raises Unreadable or OSError."""
    parameters = size = adapters = 0
    for file, named in weight_files(folder).items():
        there = file.stat().st_size
        size += there
        if file.suffix == ".safetensors":
            tensors = read_header(file)
            if missing := [tensor for tensor in named if tensor not in tensors]:
                raise Unreadable(f"{file.name} holds no {listed(missing, 4)}, which its index says it does")
            parameters += sum(math.prod(shape) for shape in tensors.values())
            if lora is not None:
                adapters += sum(_adapter(name, shape, lora) for name, shape in tensors.items())
        else:
            # A .bin file is a pickle and is not opened: its size has to tell.
            config = _read_json(folder / "config.json")
            dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
            parameters += there // BYTES_OF_DTYPE.get(dtype, 4)
    return ModelSize(parameters=parameters, bytes=size, adapters=adapters)


def _adapter(name: str, shape: tuple[int, ...], lora: LoraConfig) -> int:
    """Estimated numbers of the tensor's adapter; a matrix in a numbered layer has one."""
    layer, own = name.removesuffix(".weight"), name.endswith(".weight") and len(shape) == 2
    if not own or not any(part.isdecimal() for part in layer.split(".")):
        return 0
    is_target = lora.targets == "all-linear" or any(layer.endswith(f".{target}") for target in lora.targets)
    return lora.rank * sum(shape) if is_target else 0


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file. Raises Unreadable or OSError.

    The tensors fill the file to its last byte (https://github.com/huggingface/safetensors, Format).
    """
    there = file.stat().st_size
    with file.open("rb") as source:
        head = source.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {there} bytes")
        (length,) = _LENGTH.unpack(head)
        if length > MOST_HEADER_BYTES:
            raise Unreadable(f"{file.name} is no safetensors file (is it a pointer of git-lfs?)")
        if length > there - _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {there} bytes, and its header alone takes {length}")
        try:
            entries = json.loads(source.read(length))
            tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
            shapes = {name: tuple(int(size) for size in entry["shape"]) for name, entry in tensors.items()}
            end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreadable(f"the header of {file.name} cannot be read") from None
    end += _LENGTH.size + length
    if end > there:
        raise Unreadable(f"{file.name} is cut off: it has {there} bytes of the {end} that its header tells")
    if end < there:
        raise Unreadable(f"{file.name} has {there} bytes, and its header tells of {end}")
    return shapes


def digest(folder: Path) -> str:
    """Digest that hosts with the same model share: of config.json, and the names and sizes of the weights' files."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
    return found.hexdigest()


def check_model(path: str | None, lora: LoraConfig | None = None) -> tuple[Finding, ModelSize | None]:
    """Look at ``model.path``: the finding, and the size if it can be told, with the adapters of ``lora``."""
    if path is None:
        return ok("model", "none: everything is simulated", key=KEY), None
    folder = Path(path)
    if not folder.is_dir():
        # Not of the Path, which would take a slash of an address away.
        fix = fetch_advice(path, KEY) or "give a Hugging Face model folder, at the same place on each host"
        return fail("model", f"{path} is not a folder here", fix, key=KEY), None
    try:
        if not (folder / "config.json").is_file():
            raise Unreadable("there is no config.json, so it is not a Hugging Face model folder")
        _read_json(folder / "config.json")
        size = measure(folder, lora)
    except (OSError, Unreadable) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{folder}: {error}"
        fix = "copy or download the model's folder again, as a whole and readable for this user"
        return fail("model", told, fix, key=KEY), None
    return ok("model", f"{folder}: {size.parameters:,} parameters, {in_bytes(size.bytes)}", key=KEY), size


def check_window(config: Config) -> Finding | None:
    """Whether the longest prompt and response fit into the model's positions; None if they do, or nobody can say."""
    window = window_of(config) if not config.rollout.traits.makes_up else None
    need = config.rollout.engine_context or config.longest_sequence
    if window is None or need <= window:
        return None
    told = (
        f"the model has max_position_embeddings = {window}, and a prompt of up to data.max_prompt_tokens = "
        f"{config.data.max_prompt_tokens} and a response of up to rollout.max_tokens = {config.rollout.max_tokens} "
        f"take {need} tokens"
    )
    fix = f"lower them (and those of eval) to {window} together; the longest prompt decides what the first can be"
    return fail("model", told, fix, key="data.max_prompt_tokens")


def check_served(config: Config) -> Finding | None:
    """Whether the engine serves this architecture as the learner computes it; None if so, or nobody can say."""
    judge = config.rollout.traits.judge
    if not judge or config.model.path is None:
        return None
    try:
        model = _read_json(Path(config.model.path) / "config.json")
    except (OSError, Unreadable):
        return None
    problem = pkgutil.resolve_name(judge)(config, model)
    return fail("model", problem.told, problem.fix, key=problem.key) if problem else None


def window_of(config: Config) -> int | None:
    """The positions that the model has; None where nobody can say.

    A model that stretches its positions (rope_scaling) is the engine's to judge.
    """
    if config.model.path is None:
        return None
    try:
        model = _read_json(Path(config.model.path) / "config.json")
    except (OSError, Unreadable):
        return None
    text = model.get("text_config") or model
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    window = text.get("max_position_embeddings")
    return window if isinstance(window, int) and "factor" not in rope else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise Unreadable(f"{path.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    return value

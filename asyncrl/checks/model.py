"""The model's folder before the start: readable, whole and trainable; its size, its positions, and what serves it.

Headers are read, tensors are not (weights.py). Fails with findings, which say what to do.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.checks.findings import Finding, fail, listed, ok
from asyncrl.checks.needs import ModelSize
from asyncrl.checks.weights import (
    DOWNLOAD,
    Unreadable,
    check_form,
    check_tensors,
    read_header,
    read_json,
    weight_files,
)
from asyncrl.data.hub import fetch_advice
from asyncrl.disk import in_bytes

if TYPE_CHECKING:
    # A host looks at its model before it has the configuration of the run.
    from asyncrl.config import Config
    from asyncrl.config.lora import LoraConfig

BYTES_OF_DTYPE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the name of its dtype in config.json."""
KEY = "model.path"


def measure(folder: Path, lora: LoraConfig | None = None) -> ModelSize:
    """The size of a model that can be trained. Raises Unreadable (Untrainable) or OSError."""
    parameters = size = adapters = 0
    for file, named in weight_files(folder).items():
        there = file.stat().st_size
        size += there
        if file.suffix == ".safetensors":
            tensors = read_header(file)
            if missing := [tensor for tensor in named if tensor not in tensors]:
                raise Unreadable(f"{file.name} lacks {listed(missing, 4)}, which its index lists")
            check_tensors(file, tensors)
            parameters += sum(math.prod(tensor.shape) for tensor in tensors.values())
            if lora is not None:
                adapters += sum(_adapter(name, tensor.shape, lora) for name, tensor in tensors.items())
        else:
            # A .bin file is a pickle and is not opened: the size follows from its bytes.
            config = read_json(folder / "config.json")
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


def digest(folder: Path) -> str:
    """Digest that hosts with the same model share: of config.json, and the names and sizes of the weights' files."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
    return found.hexdigest()


def check_model(
    path: str | None, lora: LoraConfig | None = None, *, key: str = KEY
) -> tuple[Finding, ModelSize | None]:
    """Check the folder that ``key`` names: the finding and, if it passes, the size with the adapters of ``lora``."""
    if path is None:
        return ok("model", "none: everything is simulated", key=key), None
    folder = Path(path)
    if not folder.is_dir():
        # Not of the Path, which would take a slash of an address away.
        fix = fetch_advice(path, key) or "give a Hugging Face model folder, at the same place on each host"
        return fail("model", f"{path} is not a folder here", fix, key=key), None
    try:
        is_model = (folder / "config.json").is_file()
        check_form(folder, read_json(folder / "config.json") if is_model else {})
        weight_files(folder)
        if not is_model:
            raise Unreadable("there is no config.json, so it is not a Hugging Face model folder")
        size = measure(folder, lora)
    except OSError as error:
        return fail("model", f"{error.filename}: {error.strerror}", DOWNLOAD, key=key), None
    except Unreadable as error:
        return fail("model", f"{folder}: {error}", error.fix, key=key), None
    return ok("model", f"{folder}: {size.parameters:,} parameters, {in_bytes(size.bytes)}", key=key), size


def check_window(config: Config) -> Finding | None:
    """Whether the longest prompt and response fit into the model's positions; None if they do or that is unknown."""
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
    """Whether the engine serves this architecture as the learner computes it; None if so, or where that is unknown."""
    judge = config.rollout.traits.judge
    if not judge or config.model.path is None:
        return None
    try:
        model = read_json(Path(config.model.path) / "config.json")
    except (OSError, Unreadable):
        return None
    problem = pkgutil.resolve_name(judge)(config, model)
    return fail("model", problem.told, problem.fix, key=problem.key) if problem else None


def window_of(config: Config) -> int | None:
    """The positions that the model has; None where that is unknown.

    A model that stretches its positions (rope_scaling) is the engine's to judge.
    """
    if config.model.path is None:
        return None
    try:
        model = read_json(Path(config.model.path) / "config.json")
    except (OSError, Unreadable):
        return None
    text = model.get("text_config") or model
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    window = text.get("max_position_embeddings")
    return window if isinstance(window, int) and "factor" not in rope else None

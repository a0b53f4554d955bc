"""Checks that the model's folder is readable, whole, trainable and served by the engine; its size and context length.

Only the headers of safetensors files are read, never a tensor. A .bin file is not opened; only its size is used.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.disk import in_bytes
from asyncrl.core.formatting import name_some
from asyncrl.core.model_files import (
    DOWNLOAD,
    Unreadable,
    read_header,
    read_json,
    read_settings,
    text_config,
)
from asyncrl.data.rows import fetch_advice
from asyncrl.launcher.checks.findings import Finding, fail, ok
from asyncrl.launcher.checks.needs import ModelSize
from asyncrl.launcher.checks.weights import check_form, check_tensors, weight_files

BYTES_OF_DTYPE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of one parameter, by the name of its dtype in config.json."""
KEY = "model.path"


def measure(folder: Path, lora: LoraConfig | None = None) -> ModelSize:
    """Check the safetensors files of the folder, and return the model's size.

    With ``lora``, the size includes an estimate of the adapters of safetensors files. Raises Unreadable (or its
    subclass Untrainable), and OSError.
    """
    parameters = size = adapters = 0
    for file, indexed in weight_files(folder).items():
        file_bytes = file.stat().st_size
        size += file_bytes
        if file.suffix == ".safetensors":
            tensors = read_header(file)
            if missing := [tensor for tensor in indexed if tensor not in tensors]:
                raise Unreadable(f"{file.name} lacks {name_some(missing, 4)}, which its index lists")
            check_tensors(file, tensors)
            parameters += sum(math.prod(tensor.shape) for tensor in tensors.values())
            if lora is not None:
                adapters += sum(_adapter_parameters(name, tensor.shape, lora) for name, tensor in tensors.items())
        else:
            # A .bin file is a pickle and is not opened; the number of parameters follows from its length.
            config = read_json(folder / "config.json")
            dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
            parameters += file_bytes // BYTES_OF_DTYPE.get(dtype, 4)
    return ModelSize(parameters=parameters, bytes=size, adapters=adapters)


def _adapter_parameters(name: str, shape: tuple[int, ...], lora: LoraConfig) -> int:
    """Estimate the parameters of a tensor's adapter; 0 if it has none. Target matrices in numbered layers have one."""
    layer, is_matrix = name.removesuffix(".weight"), name.endswith(".weight") and len(shape) == 2
    if not is_matrix or not any(part.isdecimal() for part in layer.split(".")):
        return 0
    is_target = lora.targets == "all-linear" or any(layer.endswith(f".{target}") for target in lora.targets)
    return lora.rank * sum(shape) if is_target else 0


def digest(folder: Path) -> str:
    """Hash config.json and the names and sizes of the weight files; equal on all hosts that have the same model."""
    hashed = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        hashed.update(f"{file.name} {file.stat().st_size}\n".encode())
    return hashed.hexdigest()


def check_model(
    path: str | None, lora: LoraConfig | None = None, *, key: str = KEY
) -> tuple[Finding, ModelSize | None]:
    """Check the model folder ``path``, which the configuration's ``key`` names.

    Returns the finding and, if it passes, the model's size (with adapters if ``lora`` is given).
    """
    if path is None:
        return ok("model", "none: everything is simulated", key=key), None
    folder = Path(path)
    if not folder.is_dir():
        # ``path`` may be a URL, and Path would drop one of its slashes.
        fix = fetch_advice(path, key) or "give a Hugging Face model folder, at the same place on each host"
        return fail("model", f"{path} is not a folder here", fix, key=key), None
    try:
        has_config = (folder / "config.json").is_file()
        check_form(folder, read_json(folder / "config.json") if has_config else {})
        weight_files(folder)
        if not has_config:
            raise Unreadable("there is no config.json, so it is not a Hugging Face model folder")
        size = measure(folder, lora)
    except OSError as error:
        return fail("model", f"{error.filename}: {error.strerror}", DOWNLOAD, key=key), None
    except Unreadable as error:
        return fail("model", f"{folder}: {error}", error.fix, key=key), None
    return ok("model", f"{folder}: {size.parameters:,} parameters, {in_bytes(size.bytes)}", key=key), size


def check_window(config: Config) -> Finding | None:
    """Fail if the engine's context, or by default the longest sequence, exceeds the model's context length.

    None if it fits, if the model's context length is unknown, or if the engine makes up its tokens.
    """
    window = window_of(config) if not config.rollout.traits.makes_up else None
    need = config.rollout.engine_context or config.longest_sequence
    if window is None or need <= window:
        return None
    if config.rollout.engine_context:
        key = f"rollout.{config.rollout.traits.context_key}"
        text = f"{key} = {need} is more than the model's max_position_embeddings = {window}"
        return fail("model", text, f"lower it to {window}", key=key)
    text = (
        f"the model has max_position_embeddings = {window}, and a prompt of up to data.max_prompt_tokens = "
        f"{config.longest_prompt} and a response of up to rollout.max_tokens = {config.rollout.max_tokens} "
        f"take {need} tokens"
    )
    fix = f"lower them (and those of eval) to {window} together; the longest prompt decides what the first can be"
    return fail("model", text, fix, key="data.max_prompt_tokens")


def check_served(config: Config) -> Finding | None:
    """Fail if the engine computes this architecture differently from the learner; None if equally, or if unknown."""
    judge, model = config.rollout.traits.judge, _settings(config)
    problem = pkgutil.resolve_name(judge)(config, model) if judge and model else None
    return fail("model", problem.detail, problem.fix, key=problem.key) if problem else None


def window_of(config: Config) -> int | None:
    """Return the model's context length in tokens; None if unknown, or if the model extends it (rope_scaling)."""
    text = text_config(_settings(config))
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    window = text.get("max_position_embeddings")
    return window if isinstance(window, int) and "factor" not in rope else None


def _settings(config: Config) -> dict[str, Any]:
    """The model's config.json; empty without a model, and if it cannot be read."""
    return read_settings(config.model.path) if config.model.path is not None else {}

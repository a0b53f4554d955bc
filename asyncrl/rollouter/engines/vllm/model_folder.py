"""Reads facts about a model from its folder, without loading it, and checks versions of the weights against them.

vLLM accepts any set of adapters. If one were missing or had a wrong name, vLLM would compute that layer without an
adapter and report nothing. So ``check_adapters`` finds the adapters that a version must have.

Fails with ConfigError, which names the file and the remedy. Fails with WeightsCorrupt for weights that are not the
model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import ConfigError, WeightsCorrupt
from asyncrl.core.model_files import (
    COMPUTED,
    DTYPES,
    Unreadable,
    eos_token_ids,
    read_header,
    read_optional,
    text_config,
)
from asyncrl.weights.held_version import HeldVersion, Layout, check_complete
from asyncrl.weights.lora import layer_of, tensor_names

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor, by its checkpoint name."""

_INDEX = re.compile(r"\.\d+\.")
"""A number within a name, such as the index of a layer."""


def read_config(folder: str) -> dict[str, Any]:
    """Read config.json. Raises ConfigError if the folder has none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        what = "holds no config.json" if Path(folder).is_dir() else "is no folder"
        raise ConfigError([f"model.path: {folder} {what}; give the folder of a Hugging Face model"])
    return read_optional(path)


def stop_token_ids(folder: str, *, required: bool = True) -> list[int]:
    """Return the ids of end-of-sequence tokens: from generation_config.json, config.json and the tokenizer's files.

    Raises ConfigError if they are ``required`` and missing, because every response would run to its limit.
    """
    stop_ids = eos_token_ids(Path(folder), read_config(folder))
    token = read_optional(Path(folder) / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        tokenizer = read_optional(Path(folder) / "tokenizer.json")
        stop_ids.update(added["id"] for added in tokenizer.get("added_tokens", ()) if added["content"] == content)
    if required and not stop_ids:
        raise ConfigError(
            [
                f"model.path: {folder} names no end-of-sequence token (eos_token_id in config.json); add it there, or "
                "set rollout.stop_token_ids"
            ]
        )
    return sorted(stop_ids)


def weight_shapes(folder: str) -> Shapes | None:
    """Read the dtypes and shapes of the folder's tensors; None if a safetensors file is missing."""
    index = read_optional(Path(folder) / "model.safetensors.index.json")
    names: Iterable[str] = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    shapes: Shapes = {}
    for name in names:
        path = Path(folder) / name
        if not path.is_file():
            return None
        try:
            tensors = read_header(path)
        except Unreadable as error:
            raise ConfigError([f"model.path: {folder}: {error}"]) from None
        for tensor, entry in tensors.items():
            if not COMPUTED.search(tensor):
                shapes[tensor] = (DTYPES.get(entry.dtype, entry.dtype.lower()), entry.shape)
    return shapes


def optional_names(config: dict[str, Any], names: Iterable[str]) -> frozenset[str]:
    """Return those of ``names``, tensors of a checkpoint, that a complete set of weights may lack.

    Optional are tensors tied to another one, and tensors that are not part of the language model, such as a
    multi-token-prediction head or a vision tower. The model's classes in transformers list both kinds: the
    architecture, and the causal LM that the learner loads. ``config`` is config.json.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    patterns: list[str] = []
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""), "")
    for architecture in (*(config.get("architectures") or ()), causal):
        cls = getattr(transformers, architecture, None)
        patterns += getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
        if text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", True)):
            patterns += getattr(cls, "_tied_weights_keys", None) or ()
    return frozenset(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def check_layout(staged: HeldVersion, folder: str) -> None:
    """Raise WeightsCorrupt unless ``staged`` has all of the model's weights, in the shapes of the model's folder.

    Checks nothing if the folder has no safetensors files.
    """
    shapes = weight_shapes(folder)
    if shapes is not None:
        optional = optional_names(read_config(folder), shapes.keys() | staged.layout.keys())
        check_complete(staged.version, staged.layout, shapes, optional=optional, dtypes=False)


# --- adapters ---


def targets(lora: LoraConfig, folder: str) -> list[str] | None:
    """Return the last parts of the names of the layers that may have an adapter, such as q_proj.

    Under lora.targets = "all-linear" they come from the folder's safetensors files; None if it has none.
    """
    if lora.targets != "all-linear":
        return sorted({_last_part(target) for target in lora.targets})
    matrices = _matrix_shapes(folder)
    return None if matrices is None else sorted({_last_part(name) for name in matrices if _INDEX.search(name)})


def check_adapters(staged: HeldVersion, folder: str, lora: LoraConfig) -> None:
    """Raise WeightsCorrupt unless ``staged`` is exactly a complete set of adapters of lora.rank for the model.

    Layers are alike if their names differ only in numbers. Among alike layers that match lora.targets, all must have an
    adapter if one has. Each name in lora.targets must match a layer with an adapter. If the folder has no safetensors
    files, only the adapters' own shapes are compared.
    """
    layers = _layers(staged.layout, staged.version)
    matrices = _matrix_shapes(folder)
    if matrices is None:
        matrices = {layer: _implied_shape(staged.layout, layer) for layer in layers}
    patterns = {_INDEX.sub(".N.", layer) for layer in layers}
    if lora.targets != "all-linear":
        for target in lora.targets:
            if not any(_matches(layer, target) for layer in layers):
                raise WeightsCorrupt(f"no layer of lora.targets = {target!r} has an adapter", version=staged.version)
        matrices = {
            layer: shape for layer, shape in matrices.items() if any(_matches(layer, each) for each in lora.targets)
        }
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer, (out, into) in matrices.items():
        if _INDEX.sub(".N.", layer) in patterns:
            a, b = tensor_names(layer)
            expected |= {a: ("adapter", (lora.rank, into)), b: ("adapter", (out, lora.rank))}
    check_complete(staged.version, staged.layout, expected, dtypes=False)


def _layers(layout: Layout, version: int) -> list[str]:
    """Return the layers that have an adapter. Raises WeightsCorrupt for other tensors, or if there is no adapter."""
    parsed = {name: layer_of(name) for name in layout}
    if foreign := sorted(name for name, found in parsed.items() if found is None):
        raise WeightsCorrupt(f"{foreign[0]} is no name of an adapter's tensor", version=version)
    if not parsed:
        raise WeightsCorrupt("it holds no adapter", version=version)
    return sorted({layer for layer, _ in filter(None, parsed.values())})


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(layer: str, target: str) -> bool:
    # Compares whole parts of the name: proj does not match q_proj.
    return f".{layer}".endswith(f".{target}")


def _implied_shape(layout: Layout, layer: str) -> tuple[int, int]:
    """Return the shape [out, in] of a layer as its adapter implies it; 0 for a matrix that is missing."""
    (_, a), (_, b) = (layout.get(name, ("", (0, 0))) for name in tensor_names(layer))
    return (b[0] if b else 0, a[-1] if a else 0)


def _matrix_shapes(folder: str) -> Mapping[str, tuple[int, int]] | None:
    """Return the shapes [out, in] of the model's matrices, by layer; None if the folder has no safetensors files."""
    shapes = weight_shapes(folder)
    if shapes is None:
        return None
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, (_, shape) in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }

"""Facts about a model, read from its folder without loading it, and versions compared with them.

vLLM takes the adapters that it is given: a layer that is missing or has another's name would be computed without an
adapter, and vLLM would report nothing. So the adapters that a version must hold are found here.

Everything here is plain JSON: the configuration, the generation defaults, the tokenizer's special tokens, and the
headers of the safetensors files (https://github.com/huggingface/safetensors#format).

Fails with ConfigError naming the file and what to do; weights that are not the model's with WeightsCorrupt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import ConfigError, WeightsCorrupt
from asyncrl.weights.held_version import HeldVersion, Layout, check_complete
from asyncrl.weights.lora import layer_of, tensor_names

Shapes = dict[str, tuple[str, tuple[int, ...]]]

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Written by old versions of transformers, computed by every engine.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
# Above the 100,000,000 bytes that safetensors itself allows.
_HEADER_LIMIT = 100 << 20
_INDEX = re.compile(r"\.\d+\.")


def read_config(folder: str) -> dict[str, Any]:
    """config.json. Raises ConfigError when the folder is no model."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError([f"model.path: {folder} is no folder; give the folder of a Hugging Face model"])
    found = _read(path)
    if found is None:
        raise ConfigError([f"model.path: {folder} holds no config.json; give the folder of a Hugging Face model"])
    return found


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model; models of several modalities keep it apart."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def stop_token_ids(folder: str, *, required: bool = True) -> list[int]:
    """Ids that end a response: those of generation_config.json and config.json, and the tokenizer's own.

    Raises ConfigError when a ``required`` one is missing, because every response would run to its limit.
    """
    config = read_config(folder)
    found: set[int] = set()
    for source in (_read(Path(folder) / "generation_config.json") or {}, config, text_config(config)):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    token = (_read(Path(folder) / "tokenizer_config.json") or {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        tokenizer = _read(Path(folder) / "tokenizer.json") or {}
        found.update(added["id"] for added in tokenizer.get("added_tokens", ()) if added["content"] == content)
    if required and not found:
        raise ConfigError(
            [
                f"model.path: {folder} names no end-of-sequence token (eos_token_id in config.json); add it there, or "
                "set rollout.stop_token_ids"
            ]
        )
    return sorted(found)


def weight_shapes(folder: str) -> Shapes | None:
    """Names, dtypes and shapes in the folder's safetensors files; None if it has none."""
    index = _read(Path(folder) / "model.safetensors.index.json")
    names: Iterable[str] = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    shapes: Shapes = {}
    for name in names:
        path = Path(folder) / name
        if not path.is_file():
            return None
        for tensor, entry in _header(path).items():
            if tensor != "__metadata__" and not _COMPUTED.search(tensor):
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"].lower())
                shapes[tensor] = (dtype, tuple(entry["shape"]))
    return shapes


def optional_names(config: dict[str, Any], names: Iterable[str]) -> frozenset[str]:
    """Names of a checkpoint that a complete set of weights may lack.

    The model's own class says which: tensors that are tied to another one, and tensors in the files that are not
    part of the model (a multi-token-prediction head, for example).
    """
    import transformers

    patterns: list[str] = []
    for architecture in config.get("architectures") or ():
        cls = getattr(transformers, architecture, None)
        patterns += getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
        if text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", True)):
            patterns += getattr(cls, "_tied_weights_keys", None) or ()
    return frozenset(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def check_layout(staged: HeldVersion, folder: str) -> None:
    """Raise WeightsCorrupt unless ``staged`` has all of the model's weights, in the shapes that ``folder`` says.

    A folder without safetensors files says nothing.
    """
    shapes = weight_shapes(folder)
    if shapes is not None:
        optional = optional_names(read_config(folder), shapes.keys() | staged.layout.keys())
        check_complete(staged.version, staged.layout, shapes, optional=optional, dtypes=False)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # The shortest header is {}.
        if not 2 <= length <= _HEADER_LIMIT:
            raise ConfigError([f"model.path: {path} is no safetensors file"])
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} cannot be read: {error}"]) from error
    return found


# --- adapters ---


def targets(lora: LoraConfig, folder: str) -> list[str] | None:
    """Last parts of the names of the layers that may have an adapter; None where the folder does not say."""
    if lora.targets != "all-linear":
        return sorted({_last(target) for target in lora.targets})
    linear = _linear(folder)
    return None if linear is None else sorted({_last(name) for name in linear if _INDEX.search(name)})


def check_adapters(staged: HeldVersion, folder: str, lora: LoraConfig) -> None:
    """Raise WeightsCorrupt unless ``staged`` has nothing but adapters of lora.rank, whole and on layers of the model.

    Layers are alike where nothing but numbers in their names differ: of those that fit lora.targets, either all have an
    adapter or none. A folder without safetensors files does not say what layers there are.
    """
    layers = _layers(staged.layout, staged.version)
    linear = _linear(folder)
    if linear is None:
        linear = {layer: _shape(staged.layout, layer) for layer in layers}
    kinds = {_INDEX.sub(".N.", layer) for layer in layers}
    if lora.targets != "all-linear":
        for target in lora.targets:
            if not any(_fits(layer, target) for layer in layers):
                raise WeightsCorrupt(f"no layer of lora.targets = {target!r} has an adapter", version=staged.version)
        linear = {layer: shape for layer, shape in linear.items() if any(_fits(layer, each) for each in lora.targets)}
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer, (out, into) in linear.items():
        if _INDEX.sub(".N.", layer) in kinds:
            a, b = tensor_names(layer)
            expected |= {a: ("adapter", (lora.rank, into)), b: ("adapter", (out, lora.rank))}
    check_complete(staged.version, staged.layout, expected, dtypes=False)


def _layers(layout: Layout, version: int) -> list[str]:
    found = {name: layer_of(name) for name in layout}
    if foreign := sorted(name for name, layer in found.items() if layer is None):
        raise WeightsCorrupt(f"{foreign[0]} is no name of an adapter's tensor", version=version)
    if not found:
        raise WeightsCorrupt("it holds no adapter", version=version)
    return sorted({layer[0] for layer in found.values() if layer is not None})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fits(layer: str, target: str) -> bool:
    # By whole parts of the name: proj is no end of q_proj.
    return f".{layer}".endswith(f".{target}")


def _shape(layout: Layout, layer: str) -> tuple[int, int]:
    """Shape of a layer, [out, in], by the adapter itself; zeros where that is not whole."""
    (_, a), (_, b) = (layout.get(name, ("", (0, 0))) for name in tensor_names(layer))
    return (b[0] if b else 0, a[-1] if a else 0)


def _linear(folder: str) -> Mapping[str, tuple[int, int]] | None:
    """Matrices of the model's files by the name of their layer: [out, in]."""
    shapes = weight_shapes(folder)
    if shapes is None:
        return None
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, (_, shape) in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }

"""Facts about a model, read from its folder without loading it.

Everything here is plain JSON: the configuration, the generation defaults, the tokenizer's special tokens, and the
headers of the safetensors files (https://github.com/huggingface/safetensors#format).

Fails with ConfigError naming the file and what to do; weights that are not the model's with WeightsCorrupt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.core.errors import ConfigError
from asyncrl.weights.held_version import HeldVersion, check_complete

Shapes = dict[str, tuple[str, tuple[int, ...]]]

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Written by old versions of transformers, computed by every engine.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
# Above the 100,000,000 bytes that safetensors itself allows.
_HEADER_LIMIT = 100 << 20


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

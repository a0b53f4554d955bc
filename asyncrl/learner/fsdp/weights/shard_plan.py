"""Rows of a model's files that each rank reads: pure decisions.

A weight is cut by rows over the ranks of a replica, as FSDP2 cuts dimension 0. It keeps: over the ranks of a replica
each row belongs to one rank.

A model that cannot be read so is read whole: ``obstacle`` gives the reason. A model that cannot be trained is not read:
``refusal`` gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncrl.weights.lora import SETTINGS_FILE

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def own_rows(rows: int, rank: int, shards: int) -> range:
    """Rows of a weight that a rank holds: as torch.chunk cuts, so the last ones may have fewer or none."""
    each = -(-rows // shards)
    return range(min(rows, rank * each), min(rows, (rank + 1) * each))


def layer_of(name: str) -> str:
    """The layer that a weight is in, or the weight itself outside of any."""
    match = _LAYER.match(name)
    return match[1] if match else name


def read_together(targets: Mapping[str, str]) -> list[list[str]]:
    """Weights of a checkpoint, by the weight of the model that each becomes (a part of): those of a layer at once."""
    groups: dict[str, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(layer_of(target), []).append(name)
    return list(groups.values())


def converts_rows(operations: Sequence[tuple[str, int]], rows: int, shards: int) -> bool:
    """Whether a rank makes its rows of a weight from the same rows of the checkpoint's weight.

    ``operations`` are those of transformers' conversion: class and dimension, None where it has none. Experts are
    stacked, each of them a row, and the stack may be joined in another dimension. Each rank needs one: an empty
    stack cannot be made.
    """
    if not operations:
        return True
    stacked = operations[0] == ("MergeModulelist", 0)
    joined = all(name == "Concatenate" and dim > 0 for name, dim in operations[1:])
    return stacked and joined and len(own_rows(rows, shards - 1, shards)) > 0


def refusal(files: Collection[str], settings: Mapping[str, Any]) -> str | None:
    """Reason that a model must not be loaded at all, None where it may; by the same.

    The checks before the start find it first, on the hosts where they look (launcher/checks/weights.py).
    """
    if settings.get("quantization_config"):
        return "its weights are quantized: take the release in bfloat16, or save a dequantized copy"
    if SETTINGS_FILE in files:
        return "its folder holds an adapter: merge it into the model, or move its files elsewhere"
    return None


def obstacle(files: Collection[str], settings: Mapping[str, Any]) -> str | None:
    """Reason that a model cannot be read in shards, None where it can; by its folder's files and its config.json."""
    if settings.get("transformers_weights"):
        return "its config.json names the file of its weights"
    if ONE_FILE not in files and INDEX not in files:
        return f"its folder has neither {ONE_FILE} nor {INDEX}"
    return None

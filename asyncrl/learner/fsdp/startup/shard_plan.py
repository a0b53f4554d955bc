"""Decides which rows of a model's files each rank reads. Pure.

A weight is cut by rows over the ranks of a replica, as FSDP2 cuts dimension 0. Invariant: each row belongs to exactly
one rank of a replica.

If a model's files cannot be read by rows, rank 0 reads the model whole and sends each rank its rows: ``obstacle`` gives
the reason. A parameter that does not pass ``converts_rows`` is read whole by each rank, which keeps its own rows. If a
model cannot be trained, it is not read at all: ``refusal`` gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncrl.weights.lora import SETTINGS_FILE

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def own_rows(rows: int, rank: int, shards: int) -> range:
    """Return the rows of a weight that a rank holds, cut as by torch.chunk: the last ranks may have fewer, or none.

    ``rank`` counts within a replica, from 0 to ``shards`` - 1.
    """
    each = -(-rows // shards)
    return range(min(rows, rank * each), min(rows, (rank + 1) * each))


def layer_of(name: str) -> str:
    """Return the name of the layer that holds a weight, as "model.layers.3"; the weight's own name if none does."""
    match = _LAYER.match(name)
    return match[1] if match else name


def read_together(targets: Mapping[str, str]) -> list[list[str]]:
    """Group the weights of a checkpoint by layer, since a layer is read at once.

    ``targets`` has for each name in the checkpoint the name of the model's weight that it becomes, or is a part of.
    """
    groups: dict[str, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(layer_of(target), []).append(name)
    return list(groups.values())


def converts_rows(operations: Sequence[tuple[str, int]], rows: int, shards: int) -> bool:
    """Whether a rank can compute its rows of a model's weight from the same rows of the checkpoint's.

    ``operations`` are the steps of transformers' conversion: class name and dimension, 0 if a step has none. Without a
    step a rank can. It also can if experts are stacked, each expert as one row, and the stacks are joined in another
    dimension. But then each rank needs at least one row: transformers cannot stack nothing.
    """
    if not operations:
        return True
    stacked = operations[0] == ("MergeModulelist", 0)
    joined = all(name == "Concatenate" and dim > 0 for name, dim in operations[1:])
    return stacked and joined and len(own_rows(rows, shards - 1, shards)) > 0


def refusal(files: Collection[str], settings: Mapping[str, Any]) -> str | None:
    """Return the reason that a model must not be loaded at all; None if it may be.

    ``files`` are the names in its folder, ``settings`` its config.json.
    """
    if settings.get("quantization_config"):
        return "its weights are quantized: take the release in bfloat16, or save a dequantized copy"
    if SETTINGS_FILE in files:
        return "its folder holds an adapter: merge it into the model, or move its files elsewhere"
    return None


def obstacle(files: Collection[str], settings: Mapping[str, Any]) -> str | None:
    """Return the reason that a model cannot be read by rows; None if it can be. Arguments as of ``refusal``."""
    if settings.get("transformers_weights"):
        return "its config.json names the file of its weights"
    if ONE_FILE not in files and INDEX not in files:
        return f"its folder has neither {ONE_FILE} nor {INDEX}"
    return None

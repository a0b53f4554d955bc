"""Adapters for tiny models, as a learner publishes them, and the models that they make."""

from __future__ import annotations

import copy
from typing import Any

import torch

from asyncrl.weights.lora import tensor_names

RANK, ALPHA = 6, 15.0
"""A rank for which vLLM makes the room of 8; the scaling is no power of 2."""


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Modules of the decoder, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


def make_adapter(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Random matrices of every linear layer, large enough that log-probs differ a lot."""
    torch.manual_seed(seed)
    found = {}
    for name, layer in linear_layers(model).items():
        a, b = tensor_names(name)
        out, into = layer.weight.shape
        found[a], found[b] = torch.randn(RANK, into) * 0.1, torch.randn(out, RANK) * 0.1
    return found


def with_adapter(model: Any, adapter: dict[str, torch.Tensor]) -> Any:
    """A copy of the model with the adapter added to its weights, in float64."""
    merged = copy.deepcopy(model).double()
    for name, layer in linear_layers(merged).items():
        a, b = tensor_names(name)
        if a in adapter:
            with torch.no_grad():
                layer.weight += ALPHA / RANK * (adapter[b].double() @ adapter[a].double())
    return merged

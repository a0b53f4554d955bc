"""Low-rank adapters on linear layers of the policy (LoRA, arXiv 2106.09685): trained in place of its weights.

    y = W x + b + (alpha / rank) B A x        W [out, in] frozen, A [rank, in], B [out, rank]

A begins Kaiming-uniform and B at zero, as in PEFT (https://huggingface.co/docs/peft/package_reference/lora), so that
training begins at the model itself. A and B are additional float32 parameters of their layer; its weight and bias keep
their names. FSDP shards all of them, and computes in the compute type. Embedding and head get no adapters.

Invariant: A depends only on run.seed and on the order and shapes of the adapted layers. So the number of ranks does not
change it. Training never changes the frozen weights.

Fails with ConfigError naming lora.targets when a target matches no linear layer of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Policy

A, B = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; takes over the weight and bias of ``linear``."""

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        """Create the adapter, with B = 0 and A uninitialised; ``first_a`` computes its initial value."""
        # The layer needs no memory of its own: weight and bias are those of ``linear``.
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.enabled = True
        """Whether ``forward`` adds the adapter; if False, y = W x + b."""
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    def first_a(self, generator: torch.Generator) -> Tensor:
        """Draw the initial value of the whole matrix A from ``generator``."""
        initial = torch.empty(self.lora_A.shape)
        return nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        return torch.add(y, F.linear(F.linear(x, self.lora_A), self.lora_B), alpha=self.scale)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A in float32: [rows, in], [rank, in], [rows, rank] -> [rows, in].

    The rows may be a part of the layer's rows, the same of W and B.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def add_adapters(policy: Policy, lora: LoraConfig, *, seed: int) -> None:
    """Freeze the whole model, and put adapters on the layers that ``lora`` names. Raises ConfigError.

    The model is not sharded yet. On device "meta" the adapters get no values.
    """
    layers = _linear_layers(policy)
    chosen = _choose_names(list(layers), lora)
    policy.requires_grad_(False)
    for name in chosen:
        adapted = LoraLinear(layers[name], rank=lora.rank, alpha=lora.alpha)
        parent, _, own = name.rpartition(".")
        setattr(policy.model.get_submodule(parent), own, adapted.train(policy.training))
    with torch.no_grad():
        for name, initial in first_adapters(policy, seed=seed):
            matrix = policy.get_parameter(name)
            if not matrix.is_meta:
                matrix.copy_(initial)


def first_adapters(policy: Policy, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial values of all adapters, as pairs of the name in Policy and the whole matrix."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in adapted_layers(policy.model).items():
        yield f"model.{name}.{A}", layer.first_a(generator)
        yield f"model.{name}.{B}", torch.zeros(layer.lora_B.shape)


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def target_names(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Return the ends of layer names that PEFT's ``target_modules`` needs to find the layers with an adapter."""
    if isinstance(lora.targets, list):
        return lora.targets
    return sorted({_own_name(name) for name in adapted_layers(model)})


def unreached(policy: Policy, row: PackedRow) -> list[str]:
    """Find the layers whose adapter gets no gradient when ``row`` is scored, by name: the model does not call them.

    The model must have no gradients before; its gradients are removed afterwards.
    """
    with torch.enable_grad():
        torch.autograd.backward(policy.score(row, 1.0)[0].sum())
    without_gradient = [name for name, layer in adapted_layers(policy.model).items() if layer.lora_B.grad is None]
    policy.zero_grad(set_to_none=True)
    return without_gradient


class WithoutAdapters:
    """Scores with the initial model, by switching the adapters of ``policy`` off; needs no weights of its own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._layers = list(adapted_layers(policy.model).values())

    def score(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, as ``Policy.score`` does, without the adapters."""
        for layer in self._layers:
            layer.enabled = False
        try:
            return self._policy.score(row, temperature)
        finally:
            for layer in self._layers:
                layer.enabled = True


def _linear_layers(policy: Policy) -> dict[str, nn.Linear]:
    """Return the linear layers inside decoder layers, by name; no subclasses, which may compute something else."""
    decoder = {id(layer) for layer in policy.decoder_layers()}
    named: list[tuple[str, Any]] = list(policy.model.named_modules())
    prefixes = tuple(f"{name}." for name, module in named if id(module) in decoder)
    return {name: module for name, module in named if type(module) is nn.Linear and name.startswith(prefixes)}


def _choose_names(names: list[str], lora: LoraConfig) -> list[str]:
    """Return those of ``names`` that ``lora.targets`` matches. Raises ConfigError if a target matches none."""
    known = ", ".join(sorted({_own_name(name) for name in names})) or "none"
    if lora.targets == "all-linear":
        if not names:
            raise ConfigError(["lora.targets: the decoder of this model has no linear layer to put an adapter on"])
        return names
    unmatched = [target for target in lora.targets if not any(_matches(name, target) for name in names)]
    if unmatched:
        problem = f"{', '.join(unmatched)}: no linear layer of the decoder is called so; there are {known}"
        raise ConfigError([f"lora.targets: {problem}"])
    return [name for name in names if any(_matches(name, target) for target in lora.targets)]


def _matches(name: str, target: str) -> bool:
    """Whether ``target`` is a layer's whole name, or the end of it behind a dot."""
    return name == target or name.endswith(f".{target}")


def _own_name(name: str) -> str:
    """Return the last part of a layer's name, as "q_proj"."""
    return name.rpartition(".")[2]

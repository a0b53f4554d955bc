"""The learner's optimizer: AdamW, or Muon for the matrices of the layers with AdamW for everything else.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) steps along the nearest orthogonal matrix of a matrix's
momentum. Its steps have the root mean square of AdamW's (arXiv 2502.16982, section 2.2), so both take one learning
rate.

Invariant: every trained parameter belongs to one of the two optimizers, and its state has names of ``STATES`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config import Config
from asyncrl.learner.fsdp.model.policy import Policy, local

ADAMW_STATE, MUON_STATE = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)
STATES = (*ADAMW_STATE, *MUON_STATE)
"""Names of a parameter's state."""
MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of each of the ITERATIONS of Newton and Schulz, from Keller Jordan's post."""
RMS = 0.2
"""Root mean square of a step of AdamW, divided by the learning rate; Muon's steps get the same."""


class Muon(torch.optim.Optimizer):
    """Muon over matrices, each whole or cut into shards (DTensor).

    torch.optim.Muon computes with the shards themselves: it gathers them for each of 15 products, and fails where a
    matrix has fewer rows than ranks. Here each rank gathers the matrix once, in bfloat16, and takes its own rows of the
    step. Shards in host memory are computed on the device of the ranks.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step with every matrix that has a gradient. If matrices are sharded, all ranks call it together."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, local(matrix.grad), group["lr"], group["weight_decay"])

    def _move(self, matrix: Tensor, gradient: Tensor, rate: float, weight_decay: float) -> None:
        """Update one matrix in place: gather its momentum, orthogonalise that, and step with this rank's rows.

        ``gradient`` is this rank's part of the matrix's gradient.
        """
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum, weights = local(state["momentum_buffer"]), local(matrix)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        # Nesterov's momentum.
        ahead = gradient.lerp(momentum, MOMENTUM).bfloat16()
        step = _rows_of(orthogonal(_whole(ahead, matrix)), matrix).to(weights)
        weights.mul_(1 - rate * weight_decay)
        # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side).
        weights.add_(step, alpha=-rate * RMS * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate U V^T of a matrix U S V^T (singular value decomposition), of the same shape and type.

    Newton-Schulz iterations bring singular values to between 0.7 and 1.2, unless they are tiny compared with the norm.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    # Divided by the norm, no singular value is above 1. The clamp keeps a matrix of zeros as it is.
    iterate: Tensor = wide / wide.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    for _ in range(ITERATIONS):
        gram = iterate @ iterate.T
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.T if matrix.shape[0] > matrix.shape[1] else iterate


def _whole(part: Tensor, matrix: Tensor) -> Tensor:
    """Gather a whole matrix from each rank's ``part``; it is sharded like ``matrix``, or whole already."""
    if not isinstance(matrix, DTensor):
        return part
    mesh = matrix.device_mesh
    cut = DTensor.from_local(
        part.to(mesh.device_type),
        mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape,
        stride=matrix.stride(),
    )
    whole: Tensor = cut.full_tensor()
    return whole


def _rows_of(whole: Tensor, matrix: Tensor) -> Tensor:
    """Return this rank's part of a ``whole`` matrix that all ranks have, sharded like ``matrix``."""
    if not isinstance(matrix, DTensor):
        return whole
    return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None).to_local()


class MuonWithAdamW:
    """Combines Muon and AdamW into one optimizer, with all groups of parameters and one dict of states."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self._both = muon, adamw
        self.matrices = {parameter for group in muon.param_groups for parameter in group["params"]}
        """The parameters that Muon trains."""
        self.param_groups: list[dict[str, Any]] = [*muon.param_groups, *adamw.param_groups]
        # Both optimizers write into one dict, by parameter.
        self.state = muon.state = adamw.state

    def step(self) -> None:
        """Take a step with both optimizers."""
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self._both:
            optimizer.zero_grad()


Optimizer = torch.optim.AdamW | MuonWithAdamW


def make_optimizer(policy: Policy, config: Config) -> Optimizer:
    """Make the optimizer that ``learner.optimizer`` names, for the float32 shards of trained parameters.

    Muon gets the matrices inside of decoder layers, AdamW the rest. Norms and biases (one dimension) do not decay.
    """
    learner = config.learner
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    by_muon = _matrices_of_layers(policy) if learner.optimizer == "muon" else {}
    others = [p for p in trained if p not in by_muon]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": learner.weight_decay},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=learner.lr, betas=learner.betas, fused=True)
    if not by_muon:
        return adamw
    return MuonWithAdamW(Muon(by_muon, lr=learner.lr, weight_decay=learner.weight_decay), adamw)


def _matrices_of_layers(policy: Policy) -> dict[Tensor, None]:
    """The trained parameters of two dimensions inside of the decoder layers, each once and in order."""
    inside = (parameter for layer in policy.decoder_layers() for parameter in layer.parameters())
    return dict.fromkeys(parameter for parameter in inside if parameter.requires_grad and parameter.ndim == 2)


def state_names(optimizer: Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """Names of the parameter's state, once a step has been taken."""
    by_muon = isinstance(optimizer, MuonWithAdamW) and parameter in optimizer.matrices
    return MUON_STATE if by_muon else ADAMW_STATE


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter as it is before the first step, by name: tensors for a checkpoint to be read into."""
    return {
        name: torch.zeros((), device=parameter.device) if name == "step" else torch.zeros_like(parameter)
        for name in state_names(optimizer, parameter)
    }

"""Norms on CPU by vLLM's C kernels, which vLLM's CPU platform builds but does not use.

Importing this module imports vLLM and registers the norms as an implementation named CPU_NORMS. vLLM uses it if
``ir_op_priority`` names it. Invariant: they compute the same as vLLM's native implementation, up to rounding. Arguments
that the kernels do not take go to the native one: a variance over part of the row, or weights of another dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from asyncrl.rollouter.engines.vllm.options import CPU_NORMS

current_platform.import_kernels()


def _takes(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    """Whether the C kernels can compute these arguments."""
    return variance_size is None and x.is_contiguous() and (weight is None or weight.dtype == x.dtype)


def _takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _takes(x, weight, variance_size)


def _takes_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _takes(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


@ir.ops.rms_norm.register_impl(CPU_NORMS, supported=current_platform.is_cpu(), supports_args=_takes_norm)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Return the root-mean-square norm of ``x`` over its last dimension, times ``weight``; shape and dtype of ``x``."""
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(
    CPU_NORMS, supported=current_platform.is_cpu(), supports_args=_takes_fused, inplace=True
)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + x_residual``, written over ``x``, and the sum, written over ``x_residual``."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual

"""Norms on CPU by vLLM's own C kernels, which its CPU platform builds and does not choose.

Invariant: they compute what the native implementations do, up to rounding; what they cannot take, another size of the
variance or weights of another type, goes to those. Importing this module imports vLLM, and registers them under
CPU_NORMS; ``ir_op_priority`` has to name it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from asyncrl.rollouter.engines.vllm.options import CPU_NORMS

current_platform.import_kernels()


def _takes(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and x.is_contiguous() and (weight is None or weight.dtype == x.dtype)


def _takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _takes(x, weight, variance_size)


def _takes_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _takes(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


@ir.ops.rms_norm.register_impl(CPU_NORMS, supported=current_platform.is_cpu(), supports_args=_takes_norm)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension of ``x``, times ``weight``; shape and dtype of ``x``."""
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(
    CPU_NORMS, supported=current_platform.is_cpu(), supports_args=_takes_fused, inplace=True
)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + x_residual``, in the memory of ``x``, and the sum, in that of ``x_residual``."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual

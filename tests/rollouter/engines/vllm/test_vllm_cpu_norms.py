"""Norms of vLLM's C kernels beside its native ones, on the real vLLM."""

from __future__ import annotations

import pytest
import torch
from vllm import ir
from vllm.platforms import current_platform

from asyncrl.rollouter.engines.vllm import cpu_norms
from asyncrl.rollouter.engines.vllm.options import CPU_NORMS

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM here is not that for CPU")

EPSILON = 1e-6
NORM, FUSED = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def tensors(dtype: torch.dtype, count: int = 1) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(5, 7, 96, generator=made).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_norm_is_that_of_the_native_implementation(dtype, weighted):
    (x,) = tensors(dtype)
    weight = torch.linspace(0.5, 2.0, 96).to(dtype) if weighted else None
    kept = x.clone()
    native = NORM.impls["native"].impl_fn(x, weight, EPSILON)
    with NORM.set_priority([CPU_NORMS, "native"]):
        assert NORM.dispatch(x, weight, EPSILON).provider == CPU_NORMS
        found = NORM(x, weight, EPSILON)
    assert (found.shape, found.dtype) == (x.shape, dtype) and torch.equal(x, kept)
    torch.testing.assert_close(found, native, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_norm_of_a_sum_is_that_of_the_native_implementation_and_gives_the_sum(dtype):
    x, residual = tensors(dtype, 2)
    weight = torch.linspace(0.5, 2.0, 96).to(dtype)
    native = FUSED.impls["native"].impl_fn(x, residual, weight, EPSILON)
    found = cpu_norms.fused_add_rms_norm.impl_fn(x.clone(), residual.clone(), weight, EPSILON)
    for own, other in zip(found, native, strict=True):
        torch.testing.assert_close(own, other, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_what_the_kernels_do_not_take_goes_to_the_native_implementation():
    x, residual = tensors(torch.float32, 2)
    weight = torch.ones(96)
    with NORM.set_priority([CPU_NORMS, "native"]), FUSED.set_priority([CPU_NORMS, "native"]):
        for arguments in (
            (x, weight, EPSILON, 48),
            (x.transpose(0, 1), weight, EPSILON),
            (x, weight.to(torch.bfloat16), EPSILON),
        ):
            assert NORM.dispatch(*arguments).provider == "native"
        assert FUSED.dispatch(x, residual, weight, EPSILON).provider == CPU_NORMS
        assert FUSED.dispatch(x, residual.transpose(0, 1), weight, EPSILON).provider == "native"

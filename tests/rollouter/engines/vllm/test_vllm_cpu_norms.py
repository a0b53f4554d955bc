"""Norms of vLLM's C kernels against its native ones, on the real vLLM."""

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


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_norms_equal_those_of_the_native_implementation(dtype, off):
    made = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(5, 7, 96, generator=made).to(dtype) for _ in range(2))
    weight, kept = torch.linspace(0.5, 2.0, 96).to(dtype), x.clone()
    with NORM.set_priority([CPU_NORMS, "native"]):
        for each in (weight, None):
            native = NORM.impls["native"].impl_fn(x, each, EPSILON)
            torch.testing.assert_close(NORM(x, each, EPSILON), native, rtol=off, atol=off)
            assert torch.equal(x, kept)
    native = FUSED.impls["native"].impl_fn(x, residual, weight, EPSILON)
    found = cpu_norms.fused_add_rms_norm.impl_fn(x.clone(), residual.clone(), weight, EPSILON)
    for own, other in zip(found, native, strict=True):
        torch.testing.assert_close(own, other, rtol=off, atol=off)


def test_unsupported_inputs_go_to_the_native_implementation():
    x, weight = torch.randn(5, 7, 96), torch.ones(96)
    with NORM.set_priority([CPU_NORMS, "native"]), FUSED.set_priority([CPU_NORMS, "native"]):
        assert NORM.dispatch(x, weight, EPSILON).provider == FUSED.dispatch(x, x, weight, EPSILON).provider == CPU_NORMS
        for arguments in (
            (x, weight, EPSILON, 48),
            (x.transpose(0, 1), weight, EPSILON),
            (x, weight.to(torch.bfloat16), EPSILON),
        ):
            assert NORM.dispatch(*arguments).provider == "native"
        assert FUSED.dispatch(x, x.transpose(0, 1), weight, EPSILON).provider == "native"

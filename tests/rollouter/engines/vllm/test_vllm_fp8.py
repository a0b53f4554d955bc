"""vLLM quantizes weights to fp8 at each update. The configuration refuses that on CPUs, where it is slow and works."""

from __future__ import annotations

import asyncio
import gc
from contextlib import closing
from itertools import count

import pytest
import torch
from drifting import Learner
from rollouter.engines.changing import LEAVES_CONTEXTS, config_for
from rollouter.engines.engine_cases import PROMPT, Served, check_i4_all_of_the_weights_or_nothing, load, worst
from tiny_models import Publisher, logprobs_of, make_model, save_model

from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.engines.vllm.options import QUANTIZATIONS
from asyncrl.rollouter.serving.drift import QUANTIZED, judge, probe_engine

pytestmark = [
    *LEAVES_CONTEXTS,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() == "AVX512",
        reason="with AVX-512 vLLM has kernels of their own for fp8 on CPUs, which pack weights unlike those of GPUs",
    ),
]
NEAR = 1.0
"""Nats that rounding to fp8 moves no log-prob of a tiny model; another model is farther."""


@pytest.mark.timeout(600)
def test_i4_quantized_weights_are_updated_whole_and_the_alarm_has_wider_limits(tmp_path):
    """A part of a fused layer, a whole layer and a norm are missed in turn."""
    models = [make_model(seed, tied=True) for seed in (1, 2)]
    extra = {"quantization": QUANTIZATIONS["fp8"]}
    folder = save_model(tmp_path, make_model(0, tied=True))
    config = config_for(folder, learner={"dtype": "bfloat16", "device": "cpu"}, vllm={"extra": extra})
    assert worst(*(logprobs_of(model, PROMPT) for model in models)) > 2 * NEAR

    async def main() -> None:
        engine, versions = VllmEngine(config, "rollouter/0"), count()
        # In the dtype of the other versions.
        exact = config_for(folder, learner={"dtype": "float32", "device": "cpu"})
        with closing(Learner(exact)) as learner, closing(Publisher()) as publisher:
            try:
                await engine.start()
                served = Served(engine, publisher, versions, models, NEAR)
                for name in ("layers.1.self_attn.k_proj", "layers.0.mlp.down_proj", "layers.1.input_layernorm"):
                    missing = f"model.{name}.weight"
                    await check_i4_all_of_the_weights_or_nothing(
                        served, lambda tensors, name=missing: tensors.pop(name), "are missing", "incomplete weights"
                    )
                for noise, verdict in ((0.0, "agrees"), (0.3, "stop")):
                    manifest = learner.step(next(versions), noise)
                    version = await load(engine, manifest)
                    drift = await probe_engine(engine, manifest.probe, version=version, temperature=1.0)
                    assert judge(drift, QUANTIZED) == verdict, drift
                    assert drift.nats > 0.03, "it is quantized"
            finally:
                await engine.close()
                gc.collect()

    asyncio.run(main())

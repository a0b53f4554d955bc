"""The drift alarm over the real vLLM on CPU in bfloat16; in float32 test_vllm_engine.py has it."""

from __future__ import annotations

import gc
from contextlib import closing
from itertools import count

import pytest
import torch
from drifting import Learner, check_alarm
from rollouter.engines.changing import LEAVES_CONTEXTS, config_for
from tiny_models import save_model, sharp_model

from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving.drift import DriftLimits

pytestmark = [
    *LEAVES_CONTEXTS,
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        reason="without AVX-512 vLLM's matrices in bfloat16 are those of a fallback, with another rounding",
    ),
]
LIMITS = DriftLimits(warn=0.03, stop=0.05)
"""The defaults are those of deeper models."""


async def test_in_bfloat16_the_alarm_ignores_rounding_and_reports_wrong_weights(tmp_path, monkeypatch):
    config = config_for(save_model(tmp_path, sharp_model(0)), learner={"dtype": "bfloat16", "device": "cpu"})
    engine, versions = VllmEngine(config, "rollouter/0"), count()
    with closing(Learner(config)) as learner:
        try:
            await engine.start()
            for _ in range(4):
                await check_alarm(engine, learner, versions, LIMITS, monkeypatch)
        finally:
            await engine.close()
            gc.collect()

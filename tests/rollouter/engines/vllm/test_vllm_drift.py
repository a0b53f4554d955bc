"""The drift alarm over the real vLLM on CPU in bfloat16; in float32 test_vllm_engine.py has it."""

from __future__ import annotations

import itertools
import os
from contextlib import closing

import pytest
from drifting import Learner, check_alarm, random_prompts, texts_of
from rollouter.engines.changing import LEAVES_CONTEXTS, config_for
from tiny_models import save_model, sharp_model

from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving.drift import ROUNDING, DriftLimits

pytestmark = [*LEAVES_CONTEXTS, pytest.mark.slow, pytest.mark.timeout(800)]


@pytest.mark.parametrize("model", ["made up", "SmolLM2"])
async def test_it_is_silent_under_rounding_and_not_where_it_is_none(tmp_path, model, monkeypatch):
    if model == "made up":
        # The default limits are those of models that are deeper.
        folder, limits = save_model(tmp_path, sharp_model(0)), DriftLimits(warn=0.03, stop=0.05)
        sequences = random_prompts()
    elif "ASYNCRL_CHAT_MODEL" in os.environ:
        folder, limits = os.environ["ASYNCRL_CHAT_MODEL"], ROUNDING[False]
        sequences = texts_of(folder)
    else:
        pytest.skip("ASYNCRL_CHAT_MODEL does not name the folder of SmolLM2-135M-Instruct (make chat-model)")
    config = config_for(folder, learner={"dtype": "bfloat16", "device": "cpu"})
    engine = VllmEngine(config, "rollouter/0")
    with closing(Learner(config, sequences)) as learner:
        try:
            await engine.start()
            await check_alarm(engine, learner, itertools.count(1), limits, monkeypatch)
        finally:
            await engine.close()

"""The vLLM engine of two workers, tensor parallel, on CPU."""

import asyncio
import tempfile
from itertools import count
from pathlib import Path

import pytest
from rollouter.engines.changing import LEAVES_CONTEXTS, TOLERANCE, config_for
from rollouter.engines.engine_cases import Served, check_i4_all_of_the_weights_or_nothing
from tiny_models import Publisher, make_model, save_model

from asyncrl.rollouter.engines.vllm.engine import VllmEngine

SHARED = Path("/dev/shm")
pytestmark = [pytest.mark.slow, *LEAVES_CONTEXTS]


def test_i4_two_workers_load_all_of_the_weights_or_nothing(tmp_path, monkeypatch):
    """Both fail and both answer, so that the next call of either is answered by its own word."""
    models = [make_model(seed, tied=True) for seed in (1, 2)]
    config = config_for(save_model(tmp_path / "model", make_model(0, tied=True)))
    # A configuration asks for workers by GPUs alone.
    config.rollout.vllm.extra.update(tensor_parallel_size=2, distributed_executor_backend="mp")

    async def main():
        engine, publisher = VllmEngine(config, "rollouter/7"), Publisher()
        try:
            await engine.start()
            served = Served(engine, publisher, count(), models, TOLERANCE)
            await check_i4_all_of_the_weights_or_nothing(
                served,
                lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight"),
                "are missing",
                "incomplete weights",
            )
        finally:
            await engine.close()
            publisher.close()

    before = set(SHARED.iterdir())
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ae-") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
        asyncio.run(main())
    # vLLM leaves what its workers on CPU share.
    for path in set(SHARED.glob("vllm_dist_*")) - before:
        path.unlink()

"""The reference engine returns the routes of a mixture of experts: each token's own, over aborts and loads."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from model_matrix import VOCABULARY, make_family, save_family
from rollouter.engines.engine_cases import ask, load
from safetensors.torch import load_file
from tiny_models import Publisher

from asyncrl.config.load import validate_config
from asyncrl.rollouter.engines import make_engine
from asyncrl.weights.routers import Routers

PROMPT = [(7 * i + 3) % (VOCABULARY - 1) for i in range(11)]
TOKENS = 20
SEED = 5


def _expected(model: Any, ids: list[int]) -> np.ndarray:
    """The routes of all tokens but the last, from one pass."""
    routers = Routers(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([ids[:-1]]), use_cache=False)
    return routers.recorded().numpy()


async def _sampled(engine: Any, *, abort_after: int, routed: int = 0) -> tuple[list[int], np.ndarray, list[int]]:
    """Prompt and response, their routes behind ``routed``, and the lengths of the submissions."""
    ids, parts, known, lengths = list(PROMPT), [], routed, []
    while len(ids) < len(PROMPT) + TOKENS:
        held = len(ids) - len(PROMPT)
        request = ask(ids[:], max_tokens=TOKENS - held, held=held, routed=known, seed=SEED)
        lengths.append(0)
        async for delta in engine.generate(request):
            ids += delta.tokens
            lengths[-1] += len(delta.tokens)
            if delta.routes is not None:
                parts.append(delta.routes)
                known += len(delta.routes)
            if lengths[-1] >= abort_after and delta.finish_reason is None:
                await engine.abort([request.id])
        assert known == len(ids) - 1
    return ids, np.concatenate(parts), lengths


@pytest.mark.parametrize("family", ["Qwen3Moe", "Glm4Moe"])
async def test_each_token_has_its_route_whatever_is_aborted_and_loaded(family: str, tmp_path) -> None:
    models = [make_family(family, tied=False, seed=seed) for seed in (1, 2)]
    folder = save_family(tmp_path / "model", models[0])
    other = save_family(tmp_path / "other", models[1])
    config = validate_config(
        {
            "model": {"path": str(folder)},
            "data": {"source": "synthetic", "max_prompt_tokens": 64},
            "rollout": {"engine": "reference", "gpus_per_replica": 0, "max_tokens": 64, "stream_interval": 4},
        }
    )
    engine = make_engine(config, "rollouter/0")
    try:
        await engine.start()
        assert engine.returns_routes
        with closing(Publisher()) as publisher:
            await load(engine, publisher.publish(0, load_file(folder / "model.safetensors")))
            ids, routes, lengths = await _sampled(engine, abort_after=100)
            expected = _expected(models[0], ids)
            assert len(lengths) == 1
            assert routes.dtype == np.uint8 and np.array_equal(routes, expected)
            in_parts, routes_in_parts, lengths = await _sampled(engine, abort_after=5, routed=3)
            assert in_parts == ids and len(lengths) > 2
            assert np.array_equal(routes_in_parts, expected[3:])
            # A load between two submissions: the tokens before keep the routes of the old weights.
            await load(engine, publisher.publish(1, load_file(other / "model.safetensors")))
            request = ask(ids[:20], held=20 - len(PROMPT), max_tokens=4, routed=19, seed=SEED)
            later = [delta.routes async for delta in engine.generate(request) if delta.routes is not None]
            assert sum(map(len, later)) == 20 + 4 - 1 - 19
    finally:
        await engine.close()

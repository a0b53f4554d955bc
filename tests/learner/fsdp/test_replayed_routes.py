"""A mixture of experts learns from the routes of its engine: log-probs agree as they do for a dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import build_step, make_config, make_group, make_sequence, make_trajectory
from model_matrix import VOCABULARY, make_family, save_family
from safetensors.torch import load_file

from asyncrl.messages.groups import Group
from asyncrl.rollouter.engines.reference.model import Continuation, Model

TEMPERATURE = 0.8
SAMPLES, GROUPS, TOKENS = 4, 3, 24


def _sample(folder: Path, noise: float) -> list[Group]:
    """Groups sampled by an engine whose routers have weights with relative ``noise``, interrupted in the middle."""
    source = make_family("Qwen3Moe", tied=False)
    random = torch.Generator().manual_seed(7)
    tensors = {
        name: weight * (1 + noise * torch.randn(weight.shape, generator=random))
        if name.endswith("gate.weight")
        else weight
        for name, weight in source.state_dict().items()
    }
    source.load_state_dict(tensors)
    noisy = save_family(folder / "noisy", source)
    engine = Model(make_config(noisy).model, [VOCABULARY - 1], returns_routes=True)
    engine.load(load_file(noisy / "model.safetensors"), 0)
    numbers, groups = np.random.default_rng(3), []
    for index in range(GROUPS):
        prompt = numbers.integers(0, VOCABULARY - 1, 9).tolist()
        groups.append(make_group(index, prompt, [_response(engine, prompt, index, n) for n in range(SAMPLES)]))
    return groups


def _response(engine: Model, prompt: list[int], index: int, sample: int) -> Any:
    sequence = Continuation(
        ids=list(prompt),
        prompt=len(prompt),
        limit=len(prompt) + TOKENS,
        temperature=TEMPERATURE,
        seed=100 * index + sample,
        stop=frozenset(),
    )
    first = engine.advance(sequence, TOKENS // 2, lambda: False)
    # As after an update: everything is computed again, and keeps its routes.
    sequence.forget()
    second = engine.advance(sequence, TOKENS, lambda: False)
    routes = np.concatenate([*first.routes, *second.routes])
    assert len(routes) == len(prompt) + TOKENS - 1
    logprobs = np.array(first.logprobs + second.logprobs, np.float32)
    own = make_sequence(first.tokens + second.tokens, logprobs=logprobs, routes=routes)
    return make_trajectory(sequences=[own], reward=float(sample % 2))


def _metrics(backend: Any, config: Any, groups: list[Group]) -> dict[str, float]:
    plan = build_step(
        groups,
        version=0,
        config=config,
        world_size=config.learner.ranks,
        packed=backend.packed,
        shared=backend.shares_prefixes,
    )
    metrics: dict[str, float] = backend.train(plan)
    return metrics


@pytest.mark.parametrize("ranks", [1, 2])
def test_replayed_routes_keep_the_log_probs_of_the_engine(ranks: int, tmp_path: Path, run) -> None:
    folder = save_family(tmp_path / "model", make_family("Qwen3Moe", tied=False))
    groups = _sample(tmp_path, noise=0.01)
    found = {
        routes: run(make_config(folder, ranks=ranks, routes=routes), _metrics, groups)[0]
        for routes in ("replay", "compare")
    }
    replay, compare = found["replay"], found["compare"]
    assert replay["policy/engine_kl_tokens"] == GROUPS * SAMPLES * TOKENS
    assert replay["policy/routes_differ"] == pytest.approx(compare["policy/routes_differ"], rel=0.3)
    assert 0 < compare["policy/routes_differ"] < 0.1
    assert replay["policy/engine_kl"] < 1e-4 < compare["policy/engine_kl"]

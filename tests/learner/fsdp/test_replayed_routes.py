"""A mixture of experts learns from the routes of its engine: log-probs agree as they do for a dense model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import build_step, changed, make_config, make_group, make_sequence, make_trajectory
from model_matrix import VOCABULARY, make_family, save_family
from safetensors.torch import load_file

from asyncrl.config.algorithm import KLConfig
from asyncrl.messages.groups import Group, VersionSpan
from asyncrl.messages.routes import check_routes
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.engines.reference.engine import ReferenceEngine
from asyncrl.rollouter.engines.reference.model import Continuation, Model

TEMPERATURE = 0.8
SAMPLES, GROUPS, TOKENS = 4, 3, 24
TOLERANCE = 1e-6
"""Nats of KL, in float32."""


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


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> tuple[Path, list[Group]]:
    """A mixture of experts, and groups that an engine with other routers has sampled."""
    folder = tmp_path_factory.mktemp("noisy")
    return save_family(folder / "model", make_family("Qwen3Moe", tied=False)), _sample(folder, noise=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_replayed_routes_keep_the_log_probs_of_the_engine(ranks: int, noisy, run) -> None:
    folder, groups = noisy
    found = {
        routes: run(make_config(folder, ranks=ranks, routes=routes), _metrics, groups)[0]
        for routes in ("replay", "compare")
    }
    replay, compare = found["replay"], found["compare"]
    assert replay["policy/engine_kl_tokens"] == GROUPS * SAMPLES * TOKENS
    assert replay["policy/routes_differ"] == pytest.approx(compare["policy/routes_differ"], rel=0.3)
    assert 0 < compare["policy/routes_differ"] < 0.1
    assert replay["policy/engine_kl"] < 1e-4 < compare["policy/engine_kl"]


def test_a_teacher_without_these_experts_chooses_for_itself_and_the_reference_replays(tmp_path: Path, run) -> None:
    folder = save_family(tmp_path / "model", make_family("Qwen3Moe", tied=False))
    dense = save_family(tmp_path / "dense", make_family("Qwen3", tied=False))
    groups = _sample(tmp_path, noise=0.0)
    distilled, _ = run(make_config(folder, loss="distill", teacher=str(dense)), _metrics, groups)
    assert np.isfinite(distilled["loss/policy"]) and "policy/routes_differ" in distilled
    config = make_config(folder, kl=KLConfig(coefficient=0.1, path=str(folder)))
    metrics, _ = run(
        config, lambda backend, given: (_metrics(backend, given, groups), backend._scorers.reference.routes)
    )
    assert metrics[0]["loss/reference_kl"] == pytest.approx(0.0, abs=1e-9) and metrics[1] == "replay"


UPDATES = 20


async def _interrupted(engine: Any, prompt: list[int], name: str, update: Any) -> Any:
    """A response that an update interrupts: its tokens are of two versions, and each has its first route."""
    tokens, logprobs, routes, spans = list[int](), list[float](), list[np.ndarray](), list[VersionSpan]()
    for part in range(2):
        request = GenerationRequest(
            id=f"{name}/{part}",
            prompt_ids=[*prompt, *tokens],
            max_tokens=TOKENS - len(tokens),
            temperature=TEMPERATURE,
            seed=None,
            held=len(tokens),
            routed=sum(map(len, routes)),
        )
        start = len(tokens)
        async for delta in engine.generate(request):
            tokens += delta.tokens
            logprobs += delta.logprobs
            routes += [] if delta.routes is None else [delta.routes]
            if part == 0 and len(tokens) >= TOKENS // 3 and delta.finish_reason is None:
                await engine.abort([request.id])
        spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in delta.spans]
        if part == 0:
            await update()
    own = make_sequence(tokens, logprobs=np.array(logprobs, np.float32), routes=np.concatenate(routes), spans=spans)
    return make_trajectory(sequences=[own], reward=float(np.mean(tokens)))


async def _play(backend: Any, config: Any) -> list[dict[str, float]]:
    engine, found, version = ReferenceEngine(config, "rollouter/0"), [], 0

    async def update() -> None:
        await engine.pause("abort")
        with backend.publish(version).result() as published:
            await engine.load(published, recompute_kv=True)
        await engine.resume()

    await engine.start()
    try:
        await update()
        for _ in range(UPDATES):
            random = np.random.default_rng(version)
            groups = []
            for index in range(2):
                prompt = random.integers(0, VOCABULARY - 1, 7).tolist()
                # The weights have moved since the first token; the last ones are of the weights that are trained.
                version += 1
                made = [await _interrupted(engine, prompt, f"{version}/{n}", update) for n in range(2)]
                groups.append(make_group(index, prompt, made))
            assert all(check_routes(group, backend.experts) is None for group in groups)
            plan = build_step(groups, version=version, config=config, world_size=1, packed=True, shared=True)
            found.append(backend.train(plan))
    finally:
        await engine.close()
    return found


def test_engine_and_learner_agree_over_updates_that_interrupt_each_response(tmp_path: Path, run) -> None:
    folder = save_family(tmp_path / "model", make_family("Mixtral", tied=False))
    config = changed(
        make_config(folder, lr=3e-3, dynamic_sampling=False),
        rollout={"engine": "reference", "gpus_per_replica": 0, "stream_interval": 3, "stop_token_ids": []},
    )
    found, _ = run(config, lambda backend, given: asyncio.run(_play(backend, given)))
    assert len(found) == UPDATES
    for metrics in found:
        assert metrics["policy/engine_kl_tokens"] > 0
        assert metrics["policy/engine_kl"] < TOLERANCE
    assert any(metrics["policy/routes_differ"] > 0 for metrics in found), "older weights chose other experts"

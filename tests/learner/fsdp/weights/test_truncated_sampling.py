"""Truncated distributions from the learner to the reference engine and back, over updates that move the weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from learner.learner_cases import build_step, changed, make_config, make_group, make_trajectory, save_small_model

from asyncrl.config import Config
from asyncrl.config.algorithm import KLConfig
from asyncrl.config.monitor import DriftConfig
from asyncrl.learner.algorithm.probe_sequences import from_groups
from asyncrl.messages.groups import Group, Sequence
from asyncrl.messages.token_sets import join_sets
from asyncrl.messages.weights import Probe
from asyncrl.rollouter.engines.base import Engine, GenerationRequest
from asyncrl.rollouter.engines.reference import engine as engine_module
from asyncrl.rollouter.engines.reference.engine import ReferenceEngine
from asyncrl.rollouter.serving.drift import Drift, find_limits, judge, probe_engine

UPDATES, PROMPTS, SAMPLES, TOKENS = 20, 2, 2, 12
TOLERANCE = 1e-4
LIMITS = find_limits(DriftConfig(), float32=True)


async def _sample(engine: Engine, config: Config, prompt: list[int], name: str) -> Sequence:
    request = GenerationRequest(
        id=name,
        prompt_ids=prompt,
        max_tokens=TOKENS,
        temperature=config.rollout.temperature,
        truncation=config.rollout.truncation,
        seed=None,
    )
    tokens, logprobs, sets, spans = [], [], [], []
    async for delta in engine.generate(request):
        tokens += delta.tokens
        logprobs += delta.logprobs
        sets.append(delta.sets)
        spans = delta.spans
    arrays = {"tokens": np.array(tokens, np.int32), "logprobs": np.array(logprobs, np.float32)}
    return Sequence(**arrays, spans=spans, sets=join_sets(sets))


async def _groups(engine: Engine, config: Config, version: int) -> list[Group]:
    random = np.random.default_rng(version)
    groups = []
    for index in range(PROMPTS):
        prompt = random.integers(0, 40, 6).tolist()
        names = [f"{version}-{index}-{sample}" for sample in range(SAMPLES)]
        sequences = [await _sample(engine, config, prompt, name) for name in names]
        rewards = [float(sequence.tokens.mean()) for sequence in sequences]
        trajectories = [make_trajectory(sequences=[s], reward=r) for s, r in zip(sequences, rewards, strict=True)]
        group = make_group(index, prompt, trajectories)
        lease = msgspec.structs.replace(group.lease, truncation=config.rollout.truncation)
        groups.append(msgspec.structs.replace(group, lease=lease))
    return groups


async def _load(engine: Engine, backend: Any, version: int, probe: Probe | None) -> Drift | None:
    """Publish and load a version; the drift that its probe finds."""
    await engine.pause("wait")
    with backend.publish(version, probe).result() as new:
        await engine.load(new, recompute_kv=True)
    await engine.resume()
    if probe is None:
        return None
    rollout = backend._config.rollout
    return await probe_engine(
        engine, probe, version=version, temperature=rollout.temperature, truncation=rollout.truncation
    )


async def _play(backend: Any, config: Config, updates: int) -> list[tuple[float, dict[str, float], Drift, int]]:
    """For each update: the worst difference of a token's log-prob, metrics, drift, and the size of the largest set."""
    engine = ReferenceEngine(config, "rollouter/0")
    await engine.start()
    found = []
    try:
        await _load(engine, backend, 0, None)
        for version in range(updates):
            groups = await _groups(engine, config, version)
            plan = build_step(groups, version=version, config=config, world_size=1, packed=backend.packed)
            batches, worst = [batch for update in plan.updates for batch in update.ranks[0]], 0.0
            for batch in batches:
                scored = backend.policy.score(backend._updates._row(batch), config.rollout.temperature)[0]
                worst = max(worst, float(np.abs(scored.detach().numpy() - batch.behaviour).max()))
            largest = max(int(batch.set_sizes.max()) for batch in batches)
            metrics = backend.train(plan)
            drift = await _load(engine, backend, version + 1, backend.probe(from_groups(groups, 64)))
            assert drift is not None
            found.append((worst, metrics, drift, largest))
    finally:
        await engine.close()
    return found


def _run(backend: Any, config: Config, updates: int) -> Any:
    return asyncio.run(_play(backend, config, updates))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_small_model(tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 47}')
    return folder


def _config(model: Path, **rollout: Any) -> Config:
    # The KL makes the reference count within the sets, too.
    kl = KLConfig(coefficient=0.1, path=str(model))
    config = make_config(model, lr=3e-3, kl=kl, updates_per_batch=2)
    return changed(config, rollout={"engine": "reference", "gpus_per_replica": 0, "stream_interval": 5} | rollout)


@pytest.mark.parametrize("rollout", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_engine_and_learner_agree_on_each_token_while_the_weights_move(rollout, model, run_well) -> None:
    """Without the sets they do not."""
    config = _config(model, **rollout)
    found = run_well(config, _run, UPDATES)
    assert len(found) == UPDATES
    for worst, metrics, drift, largest in found:
        assert worst < TOLERANCE
        assert metrics["policy/engine_kl"] < TOLERANCE**2
        assert judge(drift, LIMITS) == "agrees" and drift.sampled is not None and drift.nats < TOLERANCE, drift
        assert 1 < largest <= (rollout.get("top_k") or 47)
    assert max(abs(metrics["loss/reference_kl"]) for _, metrics, *_ in found) > 1e-3, "the weights have moved"


def test_the_drift_alarm_stops_a_run_whose_engine_drops_the_sets(model, run_well, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "_sets", lambda sampled: None)
    config = _config(model, top_p=0.9)

    async def load_and_probe(backend: Any) -> Drift | None:
        engine = ReferenceEngine(config, "rollouter/0")
        await engine.start()
        try:
            groups = [make_group(0, [1, 2, 3], [make_trajectory([4, 5, 6, 7])])]
            return await _load(engine, backend, 0, backend.probe(from_groups(groups, 64)))
        finally:
            await engine.close()

    drift = run_well(config, lambda backend, _: asyncio.run(load_and_probe(backend)))
    assert judge(drift, LIMITS) == "stop", drift

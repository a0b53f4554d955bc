"""``policy/engine_kl`` compares engine and learner on equal weights: on tokens that the very weights sampled which are
trained, and on no others, from the groups of a step to its metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import VOCABULARY, make_config, make_group, make_trajectory

from asyncrl.learner.algorithm.plan.batch import build_step
from asyncrl.messages.groups import Group, VersionSpan

NEWEST = 3
SPANS = (VersionSpan(2, 0, 2), VersionSpan(NEWEST, 2, 5), VersionSpan(NEWEST, 5, 6, mixed_kv=True))
"""Spans of a response of 6 tokens: older weights, the newest, and the newest over an older KV cache."""
OFF = np.array([0.5, -0.4, 0.1, -0.2, 0.3, 0.6], dtype=np.float32)
"""Distance of the engine's log-probs from the learner's, nats."""
TEMPERATURE = 0.8
PROMPT = [1, 2, 3]


def _groups(folder: Path) -> list[Group]:
    """Two, whose engine is OFF from the model."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    random = np.random.default_rng(0)
    groups = []
    for index in range(2):
        trajectories = []
        for reward in (0.0, 1.0):
            tokens = random.integers(0, VOCABULARY, len(OFF)).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE
            exact = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
            logprobs = (exact - OFF).astype(np.float32)
            trajectories.append(make_trajectory(tokens, reward=reward, spans=list(SPANS), logprobs=logprobs))
        groups.append(make_group(index, PROMPT, trajectories))
    return groups


def _train(backend: Any, config: Any, groups: list[Group], fresh: bool) -> dict[str, float]:
    return backend.train(build_step(groups, version=NEWEST, fresh=fresh, config=config, world_size=1, packed=True))


@pytest.mark.parametrize(("updates", "trajectories"), [(1, 4), (2, 2)])
def test_it_is_of_the_tokens_of_the_newest_weights_alone(updates: int, trajectories: int, folder: Path, run) -> None:
    config = make_config(folder, updates_per_batch=updates)
    metrics, _ = run(config, _train, _groups(folder), True)
    # After an update the weights are others than the engine's.
    newest = OFF[2:5].astype(np.float64)
    assert metrics["policy/engine_kl_tokens"] == 3 * trajectories
    assert metrics["policy/engine_kl"] == pytest.approx(float((np.exp(newest) - 1 - newest).mean()), rel=1e-3)


def test_it_is_absent_where_a_step_was_taken_since(folder: Path, run) -> None:
    metrics, _ = run(make_config(folder), _train, _groups(folder), False)
    assert "policy/behaviour_kl" in metrics
    assert "policy/engine_kl" not in metrics

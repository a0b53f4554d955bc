"""``policy/engine_kl`` compares engine and learner on equal weights: on tokens that the very weights sampled which are
trained, and on no others, from the groups of a step to its metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import VOCABULARY, exact_model, exact_scores, make_config, make_group, make_trajectory
from learner.rank_pool import run_alone

from asyncrl.learner.algorithm.plan.batch import build_step
from asyncrl.messages.groups import Group, VersionSpan

NEWEST = 3
SPANS = (VersionSpan(2, 0, 2), VersionSpan(NEWEST, 2, 5), VersionSpan(NEWEST, 5, 6, mixed_kv=True))
"""Spans of a response of 6 tokens: older weights, the newest, and the newest over an older KV cache."""
OFF = np.array([0.5, -0.4, 0.1, -0.2, 0.3, 0.6], dtype=np.float32)
"""Distance of the engine's log-probs from the learner's, nats."""


def _groups(folder: Path) -> list[Group]:
    """Two, whose engine is OFF from the model."""
    model, random = exact_model(folder), np.random.default_rng(0)
    groups = []
    for index in range(2):
        tokens = random.integers(0, VOCABULARY, (2, len(OFF))).tolist()
        made = [make_trajectory(each, reward=float(at), spans=list(SPANS)) for at, each in enumerate(tokens)]
        groups.append(make_group(index, [1, 2, 3], made))
        for sequence in (sequence for trajectory in made for sequence in trajectory.sequences):
            with torch.no_grad():
                sequence.logprobs = (exact_scores(model, groups[-1], sequence)[0].numpy() - OFF).astype(np.float32)
    return groups


def _train(backend: Any, config: Any, groups: list[Group]) -> list[dict[str, float]]:
    """A step right after a version was published, and one behind it."""
    return [
        backend.train(build_step(groups, version=NEWEST, fresh=fresh, config=config, world_size=1, packed=True))
        for fresh in (True, False)
    ]


def test_it_is_of_the_tokens_of_the_newest_weights_alone(folder: Path) -> None:
    fresh, later = run_alone(make_config(folder, updates_per_batch=2), _train, _groups(folder))
    newest = OFF[2:5].astype(np.float64)
    # Of the first of two updates: behind it the weights are others than the engine's.
    assert fresh["policy/engine_kl_tokens"] == 3 * 2
    assert fresh["policy/engine_kl"] == pytest.approx(float((np.exp(newest) - 1 - newest).mean()), rel=1e-3)
    assert "policy/behaviour_kl" in later and "policy/engine_kl" not in later

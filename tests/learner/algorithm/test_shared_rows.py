"""Rows in which what sequences begin with is computed once: scores and gradients are those of whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner.learner_cases import VOCABULARY, build_step, make_config, make_group, make_trajectory, only, random_groups
from model_matrix import HYBRIDS, WINDOW, make_family, save_family
from torch import nn

from asyncrl.config.training import ModelConfig
from asyncrl.learner.algorithm.batch import OptimizerUpdatePlan
from asyncrl.learner.algorithm.packing import find_shared_prefixes, lay_out
from asyncrl.learner.algorithm.scoring import build_scoring
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.fsdp import trainer as trainer_module
from asyncrl.learner.fsdp.model.attention import Pieces, connect, packed_attention
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Policy, make_row
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.startup.startup_check import LENGTHS
from asyncrl.learner.loop.step_planner import plan_step
from asyncrl.messages.groups import Group

CPU = torch.device("cpu")


# --- attention ---


def _sequences() -> tuple[list[np.ndarray], list[int]]:
    """Two families, with rests of equal lengths and one that is no longer than its prefix, and one without another."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50, 7), random.integers(0, 50, 3)]
    rests = [(0, 9), (0, 9), (1, 2), (0, 1), (2, 6), (0, 4), (1, 2), (1, 0)]
    return [
        np.concatenate([prompts[key] if key < 2 else prompts[0][:0], random.integers(50, 90, length)])
        for key, length in rests
    ], [key for key, _ in rests]


def _attend(pieces: Pieces, values: list[torch.Tensor], keys: int, **named: Any) -> torch.Tensor:
    module = nn.Module()
    module.num_key_value_groups = 4 // keys  # type: ignore[assignment]
    reported = {
        "sequence_lengths": torch.tensor(pieces.lengths),
        "key_lengths": torch.tensor(pieces.key_lengths),
        "key_index": None if pieces.key_index is None else torch.from_numpy(pieces.key_index),
    }
    output: torch.Tensor = packed_attention(module, *values, None, **reported, **named)[0]
    return output


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (2, {"sliding_window": 5, "scaling": 0.9}),
        (1, {"sliding_window": 1}),
        (4, {"softcap": 2.0, "sliding_window": 8}),
    ],
)
def test_attention_over_shared_rows_equals_that_of_whole_sequences(keys: int, named: dict[str, Any]) -> None:
    """In float64: what comes out, and the gradients by every query, key and value."""
    sequences, families = _sequences()
    layout = lay_out(sequences, find_shared_prefixes(sequences, families))
    assert (layout.prefixes >= 0).sum() == 6
    random, places = torch.Generator().manual_seed(0), torch.from_numpy(np.concatenate(layout.places))
    values = [
        torch.randn(1, heads, len(layout.input_ids), 16, dtype=torch.float64, generator=random).requires_grad_()
        for heads in (4, keys, keys)
    ]
    shared = _attend(connect(layout.lengths, layout.prefixes), values, keys, **named)[:, places]
    whole = _attend(connect([*map(len, sequences)]), [x[:, :, places] for x in values], keys, **named)
    # Scores with a soft cap go through a softmax in float32.
    tolerance = 1e-5 if "softcap" in named else 1e-10
    torch.testing.assert_close(shared, whole, atol=tolerance, rtol=0)
    weights = torch.randn(whole.shape, dtype=torch.float64, generator=random)
    ours, truth = (torch.autograd.grad((weights * output.tanh()).sum(), values) for output in (shared, whole))
    for found, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


# --- models ---


def _groups(vocabulary: int) -> list[Group]:
    """Prompts past the window, one response of one token, and responses that begin alike."""
    random = np.random.default_rng(1)
    groups = random_groups(4, 2, samples=4)
    for index, common in ((2, 0), (3, 5)):
        prompt, start = (random.integers(0, vocabulary, n).tolist() for n in (2 * WINDOW + 1, common))
        made = [
            make_trajectory(start + random.integers(0, vocabulary, n).tolist(), reward=float(random.normal()))
            for n in (1, 7, WINDOW + 3, 7)
        ]
        groups.append(make_group(index, prompt, made))
    return groups


def _learn(policy: Policy, update: OptimizerUpdatePlan) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies by sequence, the loss, and its gradient by each parameter."""
    policy.zero_grad()
    found: dict[int, torch.Tensor] = {}
    total = torch.zeros(())
    for batch in (batch for rank in update.ranks for batch in rank if batch.sequences[0] >= 0):
        row = make_row(batch.input_ids, batch.lengths, batch.predict, batch.targets, CPU, prefixes=batch.prefixes)
        logprobs, entropies = policy.score(row, 0.8)
        factors = torch.from_numpy(batch.weights * batch.advantages)
        loss = ((factors * logprobs).sum() + 0.1 * entropies.sum()) / update.denominator
        loss.backward()
        total += loss.detach()
        for at, number in enumerate(batch.sequences.tolist()):
            own = torch.from_numpy(batch.segments == at)
            found[number] = torch.stack([logprobs.detach()[own], entropies.detach()[own]])
    scores = torch.cat([found[number] for number in sorted(found)], dim=1)
    return scores, total, *(parameter.grad.clone() for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        ("Qwen2", 10_000),
        # Soft caps and windows, windows of some layers, experts, states.
        ("Gemma2", 60),
        pytest.param("Gemma3", 60, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", 60, marks=pytest.mark.slow),
        ("Qwen3_5", 60),
        *(pytest.param(family, 60, marks=pytest.mark.slow) for family in HYBRIDS if family != "Qwen3_5"),
    ],
)
def test_a_model_learns_the_same_from_shared_rows(family: str, budget: int, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", make_family(family, tied=False))
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.entropy_gradient = True
    policy.use_attention("packed")
    config = make_config(budget=budget)
    whole, shared = (
        only(build_step(_groups(VOCABULARY), version=0, config=config, world_size=1, packed=True, shared=share))
        for share in (False, True)
    )
    assert shared.tokens < 0.7 * whole.tokens
    for ours, truth in zip(_learn(policy, shared), _learn(policy, whole), strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-5 * float(truth.abs().max()), rtol=0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", [True, False])
def test_i8_a_row_of_many_sequences_has_the_same_gradient_every_time(
    chunk: bool, folder: Path, two_threads: None
) -> None:
    """On several threads, and so many positions that torch divides what it does with them."""
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.use_attention("packed")
    policy.chunked = chunk
    random = np.random.default_rng(0)
    same, mine = (random.integers(0, VOCABULARY, n).tolist() for n in (9, 12))
    made = [make_trajectory(same + mine[i % 12 :], reward=float(i % 3)) for i in range(80)]
    config, groups = make_config(budget=10_000), [make_group(0, same, made)]
    step = build_step(groups, version=0, config=config, world_size=1, packed=True, shared=True)
    first = _learn(policy, only(step))
    for _ in range(4):
        assert all(map(torch.equal, _learn(policy, only(step)), first))


# --- ranks ---


def _both_ways(backend: Any, config: Any) -> tuple[list[dict[str, float]], list[int]]:
    plans = [
        build_step(
            _groups(VOCABULARY), version=0, config=config, world_size=config.learner.ranks, packed=True, shared=share
        )
        for share in (False, backend.shares_prefixes)
    ]
    return [backend.train(plan) for plan in plans], [plan.tokens for plan in plans]


def test_ranks_take_the_same_step_with_shared_rows(folder: Path, run_well) -> None:
    extra = {"activation_checkpointing": "full", "entropy_bonus": 0.01}
    config = make_config(folder, ranks=2, budget=100, lr=1e-12, weight_decay=0.0, **extra)
    (whole, shared), tokens = run_well(config, _both_ways)
    assert tokens[1] < 0.8 * tokens[0]
    assert shared == pytest.approx(whole, rel=1e-5, abs=1e-7)


# --- where it is not done ---


def _settled_and_prefixes(backend: Any, config: Any) -> tuple[bool, bool, set[int], set[int]]:
    """The way that was settled, and the prefixes of a step's rows, and of those of a scoring pass."""
    plan = plan_step(
        _groups(VOCABULARY),
        version=0,
        fresh=True,
        step=1,
        config=config,
        backend=backend,
        advantage=find_advantage(config.learner),
    )
    shared = backend.shares_prefixes
    scoring = build_scoring(_groups(VOCABULARY), config=config, world_size=1, packed=True, shared=shared)
    rows = ([batch for rank in ranks for batch in rank] for ranks in (only(plan).ranks, scoring.ranks))
    prefixes = [{bool((batch.prefixes >= 0).any()) for batch in batches} for batches in rows]
    assert np.isfinite(backend.train(plan)["loss/policy"])
    return backend.packed, shared, *prefixes


def test_an_error_in_long_rows_only_is_detected(folder: Path, run, monkeypatch, caplog) -> None:
    forward = Policy.forward

    def wrong(self: Policy, row: PackedRow, *rest: Any) -> Any:
        length = row.position_ids.shape[1]
        if length > sum(LENGTHS) and row.key_index is not None:
            row = replace(row, position_ids=torch.arange(length)[None])
        return forward(self, row, *rest)

    monkeypatch.setattr(Policy, "forward", wrong)
    assert run(make_config(folder, budget=10_000), _settled_and_prefixes)[0] == (True, False, {False}, {False})
    assert "common beginning" in caplog.text


def test_a_reference_that_cannot_share_rows_disables_sharing(folder: Path, run, monkeypatch) -> None:
    build = trainer_module.build_frozen

    def alone(*arguments: Any, **named: Any) -> Any:
        policy, scoring = build(*arguments, **named)
        return policy, msgspec.structs.replace(scoring, shared=False)

    config = make_config(folder, budget=10_000, kl={"coefficient": 0.1})
    monkeypatch.setattr(trainer_module, "build_frozen", alone)
    assert run(config, _settled_and_prefixes)[0] == (True, False, {False}, {False})

"""Ranks that share rows learn what one rank learns: gradients, metrics, scores; and what they refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from learner import rank_pool
from learner.learner_cases import (
    VOCABULARY,
    build_step,
    changed,
    gradients_of,
    make_config,
    plan_of,
    random_groups,
    save_small_model,
)
from learner.rank_pool import play_backend
from model_matrix import make_family, save_family
from torch import nn

from asyncrl.config import Config
from asyncrl.config.algorithm import LoraConfig, SftConfig
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.algorithm.scoring import build_scoring
from asyncrl.learner.algorithm.supervised_steps import SupervisedSteps
from asyncrl.learner.fsdp.model import attention, packed_row
from asyncrl.learner.fsdp.model.packed_row import PackedRow, RowGroup
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.startup.startup_check import LENGTHS, sharing_problem
from asyncrl.learner.fsdp.trainer import compile_seconds
from asyncrl.text.sft.conversations import Conversations, TokenizedRow
from asyncrl.text.sft.encoding import Encoded

BUDGET = 40
"""Tokens of a rank's part of a row; some rows are longer."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Four ranks need keys to be repeated, and two do not."""
KL = {"coefficient": 0.7, "estimator": "k3"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"activation_checkpointing": "full"},
    "gspo, kl, entropy bonus": {"loss": "gspo", "aggregation": "sequence", "kl": KL, "entropy_bonus": 0.5},
    "distillation, correction of sequences, truncated": {
        "loss": "distill",
        "loss_options": {"reward": 0.5},
        "correction": {"weight": "sequence", "reject": {"estimator": "k1", "limit": 3.0}},
    },
    "cispo, adapters, supervised": {"loss": "cispo", "activation_checkpointing": "selective"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), **HEADS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a reference or a teacher."""
    return save_small_model(tmp_path_factory.mktemp("other"), seed=5, intermediate_size=128, **HEADS)


def _config(folder: Path, other: Path, name: str, **learner: Any) -> Config:
    settings: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 1e9} | CASES[name]
    if "kl" in settings:
        settings["kl"] = settings["kl"] | {"path": str(other)}
    if name.startswith("distill"):
        settings["teacher"] = str(other)
    config = make_config(folder, budget=BUDGET, **settings, **learner)
    if "truncated" in name:
        config = changed(config, rollout={"top_k": 9})
    if "adapters" in name:
        config = config.model_copy(update={"lora": LoraConfig(rank=4), "sft": SftConfig(data="t", weight=0.7, batch=3)})
    return config


def _routed(backend: Any, config: Config) -> StepPlan:
    """A step whose tokens have routes by their position."""
    groups, experts = random_groups(0, 4), backend.experts
    for group in groups:
        for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
            prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
            first = (
                np.arange(len(prompt) + len(sequence.tokens) - 1)[:, None, None] + np.arange(experts.layers)[:, None]
            )
            sequence.routes = ((first + np.arange(experts.chosen)) % experts.count).astype(np.uint8)
    way = {"world_size": config.learner.row_groups, "packed": backend.packed, "shared": backend.shares_prefixes}
    return build_step(groups, version=0, config=config, **way)


def _plan(backend: Any, config: Config) -> StepPlan:
    if backend.experts is not None:
        return _routed(backend, config)
    plan = plan_of(backend, config, 0)
    if not config.sft.is_on:
        return plan
    random = np.random.default_rng(1)
    encoded = [Encoded(random.integers(0, VOCABULARY, 23).astype(np.int32), np.arange(3, 23, 2)) for _ in range(4)]
    rows = [TokenizedRow(f"t:{number}", [each]) for number, each in enumerate(encoded)]
    conversations = Conversations(rows=rows, fingerprint="f", seed=0, batch=3)
    return SupervisedSteps(config, conversations, packed=backend.packed).beside(plan, 1)


def _learn(
    backend: Any, config: Config, start: Path | None = None
) -> tuple[list[int], dict[str, np.ndarray], dict[str, float]]:
    """Tokens of the rows, rank 0's shards of the gradient, and the metrics of a step.

    The step is the second one: adapters begin at zero, where some gradients are 0. The first one is read from the
    checkpoint ``start``, or is taken and written there.
    """
    assert backend.shares_prefixes
    plan = _plan(backend, config)
    if start is not None and start.exists():
        backend.load(start)
    elif start is not None:
        backend.train(plan)
        backend.save(start).result(60)
    gradients = gradients_of(backend)
    rows = [batch for update in plan.updates for rank in update.ranks for batch in rank]
    assert any((batch.prefixes >= 0).any() for batch in rows)
    metrics = backend.train(plan)
    return [len(batch.input_ids) for batch in rows], gradients[0], metrics


def _error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Relative, over all parameters together; ``found`` may hold the first rows alone."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].astype(np.float64), expected[name][: len(found[name])]) for name in found]
    return float((sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)) ** 0.5)


@pytest.mark.parametrize(
    ("name", "ranks", "shared"),
    [
        *((name, 2, 2) for name in CASES),
        *(pytest.param(name, 4, 4, marks=pytest.mark.slow) for name in CASES),
        *(pytest.param(name, 4, 2, marks=pytest.mark.slow) for name in list(CASES)[:2]),
    ],
)
def test_ranks_that_share_rows_learn_like_one_rank(name, ranks, shared, folder, other, run_well, tmp_path) -> None:
    start = tmp_path / "start"
    _, expected, truth = run_well(_config(folder, other, name), _learn, start)
    config = _config(folder, other, name, ranks=ranks, context_parallel=shared)
    lengths, found, metrics = run_well(config, _learn, start)
    assert BUDGET < max(lengths) <= shared * BUDGET
    assert any(length % shared for length in lengths)
    assert _error(found, expected) < 1e-5
    assert metrics == pytest.approx(truth, rel=1e-5, abs=1e-7)


def _long(backend: Any, config: Config) -> tuple[int, float]:
    """The tokens of the longest row of a step, and the mean entropy."""
    plan = plan_of(backend, config, 0)
    return max(len(batch.input_ids) for batch in plan.updates[0].ranks[0]), backend.train(plan)["policy/entropy"]


def test_a_sequence_longer_than_the_budget_of_all_ranks_trains(folder, run_well) -> None:
    longest, entropy = run_well(make_config(folder, ranks=2, budget=3, context_parallel=2), _long)
    assert longest > 2 * 3
    assert entropy == pytest.approx(run_well(make_config(folder, budget=1000), _long)[1], rel=1e-5)


def _score(backend: Any, config: Config) -> list[np.ndarray]:
    groups, plain = random_groups(1, 4), {"packed": backend.packed, "shared": backend.shares_prefixes}
    scores = backend.score(build_scoring(groups, config=config, world_size=config.learner.row_groups, **plain))
    return [np.asarray(each) for each in scores]


def test_ranks_that_share_rows_score_rewards_like_one_rank(folder, other, run_well) -> None:
    settings = {"kl": KL | {"place": "reward", "path": str(other)}, "budget": BUDGET}
    expected = run_well(make_config(folder, **settings), _score)
    found = run_well(make_config(folder, ranks=2, context_parallel=2, **settings), _score)
    for ours, truth in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, truth, atol=1e-5)


# --- other attention ---


def _learn_with_kernel(rank: int, addresses: Any, config: Config) -> Any:
    from learner import varlen_kernel

    varlen_kernel.install()
    # Inductor would write C++ for minutes.
    compiled = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(attention, "DEVICE", "cpu"), mock.patch.object(torch, "compile", compiled):
        return play_backend(rank, addresses, config, _learn_and_name, ())


def _learn_and_name(backend: Any, config: Config) -> tuple[str, dict[str, float]]:
    assert (compile_seconds() > 0.0) == config.learner.compile
    return backend.policy.model.config._attn_implementation, _learn(backend, config)[2]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_in_one_kernel_works_on_shared_rows(compiled, folder, pools, run_well, monkeypatch) -> None:
    monkeypatch.setattr(rank_pool, "RANK_WAIT_S", 280.0)
    settings = {"dtype": "bfloat16", "activation_checkpointing": "selective", "lr": 0.0, "compile": compiled}
    config = make_config(folder, ranks=2, budget=BUDGET, context_parallel=2, **settings)
    (done, found), follower = pools.play(2, _learn_with_kernel, config)
    assert (done, follower) == (True, None), (found, follower)
    name, metrics = found
    assert name == attention.VARLEN
    _, _, expected = run_well(make_config(folder, budget=BUDGET, lr=0.0), _learn)
    for each in ("policy/grad_norm", "policy/entropy"):
        assert metrics[each] == pytest.approx(expected[each], rel=0.05)


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3Moe"])
def test_windows_soft_caps_and_experts_work_on_shared_rows(family, tmp_path, run_well) -> None:
    folder = save_family(tmp_path / "model", make_family(family, tied=False))
    settings = {"lr": 0.0, "balance": 0.3 * (family == "Qwen3Moe")}
    lengths, expected, truth = run_well(make_config(folder, budget=2 * BUDGET, **settings), _learn)
    assert any(length % 2 for length in lengths)
    _, found, metrics = run_well(make_config(folder, ranks=2, context_parallel=2, budget=BUDGET, **settings), _learn)
    assert _error(found, expected) < 1e-5
    assert metrics.get("loss/balance", 1.0) > 0.0
    assert ("policy/routes_differ" in metrics) == (family == "Qwen3Moe")
    assert metrics == pytest.approx(truth, rel=1e-5, abs=1e-7)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "size", "reason"),
    [
        ({}, 2, None),
        ({}, 4, "it has 2 attention heads, which 4 does not divide"),
        ({"layer_types": ["linear_attention", "full_attention"]}, 2, "it has layers with a state"),
        ({"layer_types": ["conv", "full_attention"]}, 2, "it has layers with a state"),
        ({"module": nn.ModuleList([nn.Conv1d(1, 1, 1)])}, 2, "it has layers with a state"),
        ({"rope_type": "longrope"}, 2, "depends on the longest position of a row"),
        ({"rope_type": {"full_attention": "dynamic"}}, 2, "depends on the longest position of a row"),
    ],
)
def test_models_that_ranks_cannot_share_are_named(settings: dict[str, Any], size: int, reason: str | None) -> None:
    rotation = SimpleNamespace(rope_type=settings.pop("rope_type", "default"))
    text = SimpleNamespace(num_attention_heads=2, **settings)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), modules=lambda: [rotation])
    layers = [nn.ModuleList([settings.pop("module", nn.Linear(1, 1))])]
    found = sharing_problem(SimpleNamespace(model=model, decoder_layers=lambda: layers), size)
    assert found is None if reason is None else reason in (found or "")
    assert sharing_problem(Policy(make_family("Gemma3", tied=False)), 2) is None


def _nothing(backend: Any, config: Config) -> None:
    """The check at start alone."""


def test_a_model_with_too_few_heads_is_refused_on_all_ranks(folder, run) -> None:
    with pytest.raises(
        AssertionError, match=r"ConfigError: learner.context_parallel: 3 ranks cannot share .* 4 attention"
    ):
        run(make_config(folder, ranks=3, context_parallel=3), _nothing)


def _play_wrong(rank: int, addresses: Any, config: Config, least: int) -> Any:
    """In rows of at least so many tokens each rank gives all tokens position 0."""
    right: Callable[..., tuple[PackedRow, Any, int]] = packed_row.own_slice

    def wrong(row: PackedRow, group: RowGroup) -> tuple[PackedRow, Any, int]:
        own, *rest = right(row, group)
        return (replace(own, position_ids=own.position_ids * 0) if row.input_ids.shape[1] >= least else own), *rest

    with mock.patch("asyncrl.learner.fsdp.model.policy.own_slice", wrong):
        return play_backend(rank, addresses, config, _nothing, ())


@pytest.mark.parametrize("least", [0, sum(LENGTHS) + 1])
def test_a_model_whose_shared_rows_differ_is_refused_by_both_parts_of_the_check(least, folder, pools) -> None:
    config = make_config(folder, ranks=2, context_parallel=2)
    words = "ConfigError: learner.context_parallel: is 2, but with this model log-probs of a row that ranks share"
    (done, problem), follower = pools.play(2, _play_wrong, config, least)
    assert not done
    assert problem.startswith(words) and follower.startswith(words)
    assert ("on cpu" in problem) == bool(least)

"""Supervised steps and terms on real ranks, against a plain float64 loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import (
    VOCABULARY,
    build_step,
    changed,
    exact_model,
    gradients_of,
    make_config,
    random_groups,
    same,
    train,
)
from learner.rank_pool import run_alone
from segment_reading import weights_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.config.algorithm import SftConfig
from asyncrl.core.errors import NonFiniteStep
from asyncrl.learner.algorithm.supervised_steps import SupervisedSteps
from asyncrl.text.sft.conversations import Conversations, TokenizedRow
from asyncrl.text.sft.encoding import Encoded

WEIGHT = 0.7
BUDGETS = (10_000, 25)


def _conversations(count: int = 5, batch: int = 3) -> Conversations:
    """Conversations of one or two sequences each; their tokens are runs of letters, which can be learnt."""
    random, rows = np.random.default_rng(1), []
    for number in range(count):
        sequences = []
        for _ in range(1 + number % 2):
            length, first = int(random.integers(6, 20)), int(random.integers(VOCABULARY))
            ids = ((first + np.arange(length)) % VOCABULARY).astype(np.int32)
            trained = np.flatnonzero(random.random(length) < 0.6)
            sequences.append(Encoded(ids, np.unique(np.append(trained[trained > 0], 3)).astype(np.int32)))
        rows.append(TokenizedRow(f"talk.jsonl:{number + 1}", sequences))
    return Conversations(rows=rows, fingerprint="f", seed=0, batch=batch)


def _config(folder: Path, *, ranks: int = 1, budget: int = 64, sft: dict[str, Any] | None = None, **learner: Any):
    config = make_config(folder, ranks=ranks, budget=budget, **learner)
    return config.model_copy(update={"sft": SftConfig(data="talk.jsonl", **(sft or {"weight": WEIGHT, "batch": 3}))})


def _steps(config, *, packed: bool = True) -> SupervisedSteps:
    return SupervisedSteps(config, _conversations(batch=config.sft.batch), packed=packed)


def _mixed(config, step: int, *, packed: bool = True):
    plan = build_step(random_groups(step, 2), version=0, config=config, world_size=config.learner.ranks, packed=packed)
    return _steps(config, packed=packed).beside(plan, step)


def test_conversations_continue_after_the_warm_steps_and_are_shared_by_updates(folder) -> None:
    config = _config(folder, sft={"weight": 1.0, "warm_steps": 4, "batch": 2})
    steps, rows = _steps(config), _conversations(batch=2)
    assert steps.warm_step(4).updates[0].supervised.places[0] == rows.of_step(4)[0].place
    plan = build_step(random_groups(0, 2), version=0, config=config, world_size=1, packed=True)
    assert steps.beside(plan, 1).updates[0].supervised.places[0] == rows.of_step(5)[0].place
    halves = _mixed(_config(folder, updates_per_batch=2), 1).updates
    shares = [update.supervised.places for update in halves]
    whole = [row.place for row in _conversations().of_step(1) for _ in row.sequences]
    assert all(shares) and [place for share in shares for place in share] == whole
    without = changed(config, sft={"weight": 0.0})
    assert _steps(without).beside(plan, 1) is plan


def test_a_user_loss_with_a_reference_is_refused_with_warm_steps(folder) -> None:
    config = _config(folder, sft={"warm_steps": 2}, loss="losses_of_a_user:referred")
    with pytest.raises(AssertionError, match=r"ConfigError: learner\.kl\.path: .* sft\.warm_steps change the policy"):
        run_alone(config, lambda backend, config: None)


def _nll(model: Any, sequence: Encoded) -> torch.Tensor:
    logp = torch.log_softmax(model(torch.from_numpy(sequence.ids).long()[None]).logits[0].double(), dim=-1)
    places = torch.from_numpy(sequence.trained).long()
    return -logp[places - 1, torch.from_numpy(sequence.ids).long()[places]]


def _plain(folder: Path, number: int) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of the conversations of a step, and its gradient: float64, one sequence at a time."""
    model = exact_model(folder)
    rows = _conversations().of_step(number)
    loss = torch.cat([_nll(model, sequence) for row in rows for sequence in row.sequences]).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad.numpy() for name, p in model.named_parameters()}


def _gradients(backend, config, *plans: str) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Rank 0's shards of the gradient of a step for each plan and budget, before the optimizer sees it; the metrics."""
    found, metrics = gradients_of(backend), []
    for kind in plans:
        for budget in BUDGETS:
            cut = changed(config, learner={"tokens_per_microbatch": budget})
            if kind == "mixed":
                plan = _mixed(cut, 1, packed=backend.packed)
                metrics.append(plan.metrics | backend.train(plan))
            elif kind == "warm":
                metrics.append(backend.train(_steps(cut, packed=backend.packed).warm_step(1)))
            else:
                metrics.append(train(backend, cut, 1, 2))
    return list(zip(found, metrics, strict=True))


def test_the_gradient_of_the_token_mean_does_not_depend_on_micro_batches(folder, run) -> None:
    loss, expected = _plain(folder, 1)
    sft = {"weight": WEIGHT, "batch": 3, "warm_steps": 9, "lr": 0.0}
    config = _config(folder, ranks=2, lr=0.0, max_grad_norm=1e9, sft=sft | {"warm_steps": 0})
    # Warm steps are taken although the run has none, so that all plans have the same conversations.
    found, _ = run(config, _gradients, "warm", "mixed", "alone")
    count = len(BUDGETS)
    warm, mixed, alone = found[:count], found[count : 2 * count], found[2 * count :]
    for (gradient, metrics), (both, of_both), (policy, of_policy) in zip(warm, mixed, alone, strict=True):
        for name, values in gradient.items():
            rows = expected[name][: len(values)]
            assert np.abs(values - rows).max() <= 1e-5 * max(1.0, np.abs(rows).max()), name
            together = policy[name] + WEIGHT * rows
            assert np.abs(both[name] - together).max() <= 1e-5 * max(1.0, np.abs(together).max()), name
        assert metrics["loss/sft"] == pytest.approx(loss, rel=1e-5)
        assert of_both["loss/sft"] == pytest.approx(loss, rel=1e-5)
        assert sorted(metrics) == ["learner/lr", "loss/sft", "policy/grad_norm"]
        assert of_both["loss/policy"] == pytest.approx(of_policy["loss/policy"], abs=1e-6)
        assert of_both["policy/entropy"] == pytest.approx(of_policy["policy/entropy"], rel=1e-5)
        assert "loss/sft" not in of_policy
        rows = _conversations().of_step(1)
        tokens = sum(len(sequence.trained) for row in rows for sequence in row.sequences)
        assert (of_both["sft/tokens"], of_both["sft/epochs"]) == (tokens, 3 / 5)


TAUGHT = {"warm_steps": 14, "lr": 1e-2, "weight": WEIGHT, "batch": 3}


def _weights(backend) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in weights_of(backend.publish(1).result()).items()}


def _warm_then_train(backend, config, save_at: int, target: Path) -> dict[str, Any]:
    """All warm steps and three mixed ones; a checkpoint after so many warm steps."""
    steps = _steps(config, packed=backend.packed)
    losses, lrs = [], []
    while backend.warm_steps < config.sft.warm_steps:
        if backend.warm_steps == save_at:
            backend.save(target).result(60)
        metrics = backend.train(steps.warm_step(backend.warm_steps + 1))
        losses.append(metrics["loss/sft"])
        lrs.append(metrics["learner/lr"])
    fresh: list[bool] = []
    watch = register_optimizer_step_pre_hook(lambda optimizer, *_: fresh.append(not optimizer.state))
    losses += [backend.train(_mixed(config, step, packed=backend.packed))["loss/sft"] for step in (1, 2, 3)]
    watch.remove()
    return {"losses": losses, "lrs": lrs, "fresh": fresh, "weights": _weights(backend), "steps": backend.steps}


def _load_then_train(backend, config, source: Path) -> dict[str, Any]:
    backend.load(source)
    before = backend.warm_steps, backend.steps
    return _warm_then_train(backend, config, -1, source) | {"before": before}


def test_a_warm_start_learns_and_resumes_in_its_middle_bit_for_bit(folder, tmp_path) -> None:
    config, target = _config(folder, sft=TAUGHT), tmp_path / "trainer"
    found = run_alone(config, _warm_then_train, 10, target)
    warm, mixed = found["losses"][:14], found["losses"][14:]
    assert max(warm[-3:]) < 0.5 * warm[0]
    assert max(mixed) < 0.5 * warm[0]
    assert found["fresh"] == [True, False, False] and found["steps"] == 3
    assert found["lrs"] == [pytest.approx(1e-2 * (15 - step) / 14) for step in range(1, 15)]
    resumed = run_alone(config, _load_then_train, target)
    assert resumed["before"] == (10, 0)
    assert resumed["losses"] == found["losses"][10:]
    assert same(resumed["weights"], found["weights"])
    # With fewer warm steps than were taken the run begins with a new optimizer as well.
    fewer = run_alone(_config(folder, sft=TAUGHT | {"warm_steps": 8}), _load_then_train, target)
    assert fewer["before"] == (10, 0) and fewer["fresh"] == [True, False, False]


def _refuse(backend, config) -> list[tuple[str, list[str], list[str], str, bool]]:
    """A warm step and a mixed one with a NaN in the log-probs of a conversation."""
    import asyncrl.learner.fsdp.optimizer_updates as updates

    found, steps = [], _steps(config, packed=backend.packed)
    real = updates.supervised

    def poisoned(logprobs):
        spoilt = logprobs.new_zeros(len(logprobs))
        spoilt[-1] = float("nan")
        return real(logprobs) + spoilt

    updates.supervised = poisoned
    try:
        for plan in (steps.warm_step(1), _mixed(config, 1, packed=backend.packed)):
            before = _weights(backend)
            try:
                backend.train(plan)
            except NonFiniteStep as error:
                found.append((error.what, error.uids, error.places, str(error), same(_weights(backend), before)))
    finally:
        updates.supervised = real
    return found


def test_a_loss_that_is_not_finite_names_the_conversations(folder) -> None:
    config = _config(folder, sft=TAUGHT | {"warm_steps": 1}, on_nonfinite="skip")
    found = run_alone(config, _refuse)
    assert [each[0] for each in found] == ["supervised loss"] * 2
    assert all(places and not uids and unchanged for _, uids, places, _, unchanged in found)
    assert (
        "the supervised loss of warm step 1 is not finite; no step was taken (conversations talk.jsonl:" in found[0][3]
    )
    assert "the supervised loss of step 1 is not finite" in found[1][3]

"""Steps of every loss and of several updates, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import (
    TEMPERATURE,
    build_step,
    changed,
    exact_model,
    gradients_of,
    make_config,
    random_groups,
)
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.core.errors import NonFiniteStep
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.algorithm.losses import TokenBatch
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.scoring import build_scoring
from asyncrl.learner.algorithm.user_functions import make_objective

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ratio of a sequence, reference, entropy bonus": {
        "loss": "gspo",
        "kl": {"coefficient": 0.7, "estimator": "k3", "path": ""},
        "entropy_bonus": 0.5,
    },
    "teacher, corrections": {
        "loss": "distill",
        "loss_options": {"reward": 0.5},
        "teacher": "",
        "correction": {"weight": "sequence", "mask": (0.1, 5.0), "reject": {"estimator": "k1", "limit": 3.0}},
        "advantage": "rloo",
        "aggregation": "constant",
    },
}
"""Objectives that look beyond one token or one model; losses of single tokens are sums of the same kind."""
BUDGETS = (10_000, 10)


def _plan(config, step: int, *, packed: bool = True, budget: int | None = None) -> StepPlan:
    if budget is not None:
        config = changed(config, learner={"tokens_per_microbatch": budget})
    groups = random_groups(step, 4, truncated=config.rollout.truncation is not None)
    return build_step(groups, version=0, config=config, world_size=config.learner.ranks, packed=packed)


def _score(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the targets within their sets, and entropies."""
    logits = model(torch.from_numpy(batch.input_ids).long()[None]).logits[0, torch.from_numpy(batch.predict).long()]
    ends = np.cumsum(batch.set_sizes)
    taken, entropies = [], []
    for row, target, size, end in zip(logits / TEMPERATURE, batch.targets.tolist(), batch.set_sizes, ends, strict=True):
        members = batch.set_ids[end - size : end].tolist() or list(range(len(row)))
        logp = torch.log_softmax(row[members], dim=-1)
        taken.append(logp[members.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(taken), torch.stack(entropies)


def _plain(folder: Path, config) -> list[dict[str, np.ndarray]]:
    """The gradient of each update of a step, float64, one sequence at a time; the objective is ours."""
    model, path = exact_model(folder), config.learner.kl.path or config.learner.teacher
    other = exact_model(path) if path else None
    first = [p.detach().clone() for p in model.parameters()]
    objective = make_objective(config.learner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, betas=(0.9, 0.95), weight_decay=0.0)
    gradients = []
    for update in _plan(config, 0, packed=False).updates:
        for (batch,) in zip(update.ranks[0], strict=True):
            now = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), first, strict=True):
                    parameter.copy_(value)
                proximal = _score(model, batch)[0]
                frozen = _score(other, batch)[0] if other else None
                for parameter, value in zip(model.parameters(), now, strict=True):
                    parameter.copy_(value)
            logprobs, entropies = _score(model, batch)
            tokens = TokenBatch(
                logprobs=logprobs,
                entropies=entropies,
                proximal=proximal,
                **{
                    name: torch.from_numpy(getattr(batch, name)).double()
                    for name in ("behaviour", "advantages", "weights")
                },
                segments=torch.zeros(len(batch.predict), dtype=torch.int64),
                sequences=1,
                staleness=torch.from_numpy(batch.staleness),
                reference=frozen,
                teacher=frozen,
            )
            objective(tokens, update.denominator)[0].backward()
        gradients.append({name: p.grad.float().numpy().copy() for name, p in model.named_parameters()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def _gradients(backend, config, *budgets: int) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """Rank 0's shards of the gradient of each update, before the optimizer sees it, and the metrics of the last step.

    For a step with each of the ``budgets``.
    """
    found = gradients_of(backend)
    for budget in budgets:
        metrics = backend.train(_plan(config, 0, packed=backend.packed, budget=budget))
    return found, metrics


def _error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Relative, over all parameters together; ``found`` may hold the first rows alone."""
    assert found.keys() == expected.keys()
    pairs = [(found[name], expected[name][: len(found[name])]) for name in found]
    difference = sum(float(((a - b).astype(np.float64) ** 2).sum()) for a, b in pairs)
    return (difference / sum(float((b.astype(np.float64) ** 2).sum()) for _, b in pairs)) ** 0.5


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_the_micro_batches(name, truncated, folder, other, run) -> None:
    """2 ranks, two budgets, sequences of unequal lengths; in one way a rank has less to do than the other.

    ``truncated``: every model counts within the sets that the tokens were sampled from.
    """
    settings: dict[str, Any] = {"lr": 0.0, "max_grad_norm": 1e9} | OBJECTIVES[name]
    if "kl" in settings:
        settings["kl"] = settings["kl"] | {"path": str(other)}
    elif "teacher" in settings:
        settings["teacher"] = str(other)
    rollout = {"top_k": 9 if truncated else 0}
    (expected,) = _plain(folder, changed(make_config(folder, **settings), rollout=rollout))
    config = changed(make_config(folder, ranks=2, **settings), rollout=rollout)
    plans = [_plan(config, 0, budget=budget).updates[0].ranks for budget in BUDGETS]
    assert any(batch.sequences[0] < 0 for ranks in plans for rank in ranks for batch in rank)
    (found, _), _ = run(config, _gradients, *BUDGETS)
    assert [_error(each, expected) for each in found] == pytest.approx([0.0] * len(BUDGETS), abs=1e-5)


def _cut_up(backend, config) -> list[bool]:
    """Whether rank 0 holds nothing but its shards of the reference: in a step's passes, after a pass for rewards."""
    reference, found = backend._scorers.reference, []

    def look(phase: str) -> None:
        if phase == "forward and backward":
            found.append(all(isinstance(parameter, DTensor) for parameter in reference.parameters()))

    backend.on_phase = look
    backend.train(_plan(config, 0, packed=backend.packed))
    backend.score(build_scoring(random_groups(1, 4), config=config, world_size=2, packed=backend.packed))
    look("forward and backward")
    return found


def test_a_frozen_model_is_resharded_between_its_passes(folder, other, run_well) -> None:
    settings = {"kl": {"coefficient": 0.7, "path": str(other)}}
    assert run_well(make_config(folder, ranks=2, **settings), _cut_up) == [True, True]


def test_several_updates_are_compared_with_the_weights_before_the_first(folder, run) -> None:
    settings = {
        "lr": 3e-3,
        "max_grad_norm": 1e9,
        "updates_per_batch": 3,
        "loss_options": {"clip_low": 0.01, "clip_high": 0.02},
    }
    expected = _plain(folder, make_config(folder, **settings))
    (found, metrics), _ = run(make_config(folder, ranks=2, **settings), _gradients, 50)
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        # Adam's first steps turn rounding errors of a gradient near 0 into whole steps.
        assert _error(ours, plain) < (1e-5 if not number else 2e-2)
    # In the first update no clip acts, in later ones it does.
    assert 0.0 < metrics["loss/clipped_fraction"] < 1.0


def _poison_an_update(backend, config) -> tuple[Any, int, int]:
    """A NaN in one sequence of the second of two updates; then a step as any."""
    plan = _plan(config, 0, packed=backend.packed)
    victim = plan.updates[1].ranks[-1][-1]
    victim.behaviour[0] = np.nan
    uids = [plan.updates[1].sequences[victim.sequences[0]].uid]
    taken: list[Any] = []
    watch = register_optimizer_step_pre_hook(lambda *_: taken.append(None))
    with pytest.raises(NonFiniteStep) as caught:
        backend.train(plan)
    watch.remove()
    error, first = caught.value, len(taken)
    facts = (error.what, error.uids == uids, error.trained == plan.updates[0].uids, bool(error.metrics), str(error))
    assert all(np.isfinite(value) for value in backend.train(_plan(config, 1, packed=backend.packed)).values())
    return facts, first, backend.steps


def test_a_refused_update_ends_the_step_and_keeps_earlier_updates(folder, run_well) -> None:
    """On one rank; with more, each raises in its own actor, as for a gradient that is not finite."""
    config = make_config(folder, updates_per_batch=2, on_nonfinite="skip")
    facts, taken, steps = run_well(config, _poison_an_update)
    assert facts[:4] == ("loss", True, True, True)
    assert "no step was taken" not in facts[4]
    assert (taken, steps) == (1, 2)

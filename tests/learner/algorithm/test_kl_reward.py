"""The divergence from the reference in the rewards, against a plain float64 loop, token by token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.learner_cases import (
    build_step,
    make_config,
    make_group,
    make_sequence,
    make_trajectory,
    random_groups,
)

from asyncrl.config.algorithm import KLConfig
from asyncrl.core.errors import NonFiniteStep
from asyncrl.learner.algorithm.batch import step_metrics
from asyncrl.learner.algorithm.scoring import build_scoring, by_group, kl_penalties, sampled_sequences
from asyncrl.messages.groups import Turn, sampled_positions

COEFFICIENT = 0.3


def _config(model: Path | None = None, *, estimator: str = "auto", **settings: Any):
    kl = {"coefficient": COEFFICIENT, "place": "reward", "estimator": estimator, "path": settings.pop("path", None)}
    return make_config(model, kl=kl, **{"advantage": "dr_grpo"} | settings)


def _array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _played():
    """A trajectory of two turns and a fork, and one of a single answer."""
    first = make_sequence(
        [10, 11, 30, 12],
        roles="sscs",
        logprobs=_array(-1.0, -2.0, -0.5),
        turns=[Turn(0, 2, 0.0), Turn(3, 4, 0.25)],
    )
    fork = make_sequence([10, 13], roles="rs", logprobs=_array(-3.0), prompt_ids=np.array([5], np.int32))
    long = make_trajectory(sequences=[first, fork], reward=1.0)
    return make_group(0, [1, 2], [long, make_trajectory([20, 21], reward=0.0, logprobs=_array(-1.0, -1.0))])


REFERENCE = [[[np.array([-1.5, -1.0, -0.75]), np.array([-2.0])], [np.array([-1.0, -3.0])]]]


def test_the_kl_penalty_of_a_turn_excludes_earlier_tokens_of_its_sequence() -> None:
    found = kl_penalties([_played()], REFERENCE, KLConfig(coefficient=2.0, place="reward"), step=1)
    # k1: 0.5, -1.0 | 0.25 in the first sequence, -1.0 in the fork, 0.0, 2.0 in the other trajectory.
    assert found.total[0].tolist() == [2 * (0.5 - 1.0 + 0.25 - 1.0), 2 * 2.0]
    assert [each.tolist() for each in found.past[0]] == [[0.0, 2 * (0.5 - 1.0), 0.0], [0.0]]
    assert found.metrics["reward/kl_penalty"] == (-2.5 + 4.0) / 2
    assert found.metrics["policy/reference_kl"] == pytest.approx((-1.25 + 2.0) / 6)

    plan = build_step([_played()], penalties=found, version=0, config=_config(), world_size=1, packed=True)
    [[batch]] = plan.updates[0].ranks
    rewards = [1.0 + 2.5, 0.0 - 4.0]
    mean = sum(rewards) / 2
    returns = [rewards[0] - mean, rewards[0] - mean, rewards[0] - mean - 0.25 + 2 * (0.5 - 1.0), rewards[0] - mean]
    assert batch.advantages.tolist() == pytest.approx([*returns, rewards[1] - mean, rewards[1] - mean])
    assert step_metrics([_played()], [], 0, _config())["reward/mean"] == 0.5
    assert plan.metrics["reward/kl_penalty"] == 0.75


K = {
    "k1": lambda r: r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: math.exp(-r) - 1 + r,
}


@pytest.mark.parametrize(("name", "used"), [("auto", "k1"), ("k2", "k2"), ("k3", "k3")])
def test_each_kl_estimator_matches_its_formula_for_every_token(name, used) -> None:
    groups = random_groups(3, 3)
    random = np.random.default_rng(0)
    reference = by_group(groups, [-3 * random.random(len(s.logprobs)) for _, s in sampled_sequences(groups)])
    reference[0][0][0][0] = -500.0
    config = KLConfig(coefficient=0.5, place="reward", estimator=name)
    found = kl_penalties(groups, reference, config, step=1)
    for group, of_group, total in zip(groups, reference, found.total, strict=True):
        for trajectory, scores, penalty in zip(group.trajectories, of_group, total, strict=True):
            expected = 0.0
            for sequence, values in zip(trajectory.sequences, scores, strict=True):
                for behaviour, other in zip(sequence.logprobs.tolist(), values.tolist(), strict=True):
                    expected += 0.5 * K[used](min(max(behaviour - other, -20.0), 20.0))
            assert penalty == pytest.approx(expected, rel=1e-9)


def test_a_reference_that_is_not_finite_names_the_group() -> None:
    broken = [[[np.array([-1.5, float("nan"), -0.75]), np.array([-2.0])], [np.array([-1.0, -3.0])]]]
    with pytest.raises(NonFiniteStep, match=r"log-probs by the reference of step 7 is not finite.*0-0"):
        kl_penalties([_played()], broken, KLConfig(coefficient=1.0, place="reward"), step=7)


@given(
    seed=st.integers(0, 30),
    world_size=st.integers(1, 3),
    budget=st.integers(1, 80),
    packed=st.booleans(),
    shared=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_a_scoring_pass_gives_each_token_its_value_for_any_micro_batches(
    seed, world_size, budget, packed, shared
) -> None:
    """Values that name the token that is predicted, and the one before it."""
    config = make_config(budget=budget)
    groups = random_groups(seed, 3)
    plan = build_scoring(groups, config=config, world_size=world_size, packed=packed, shared=shared)
    assert len({len(rank) for rank in plan.ranks}) == 1
    values = [
        np.concatenate([1000.0 * batch.input_ids[batch.predict] + batch.targets for batch in rank])
        for rank in plan.ranks
    ]
    found = plan.in_order(values)
    for (group, sequence), each in zip(sampled_sequences(groups), found, strict=True):
        prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
        ids = np.concatenate([prompt, sequence.tokens])
        places = sampled_positions(sequence) + len(prompt)
        assert each.tolist() == (1000.0 * ids[places - 1] + ids[places]).tolist()

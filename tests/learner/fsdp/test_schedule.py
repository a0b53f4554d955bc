"""The learning rate of each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.algorithm import SftConfig
from asyncrl.config.training import LearnerConfig
from asyncrl.learner.fsdp.schedule import learning_rate, warm_learning_rate


@pytest.mark.parametrize(
    ("warmup_steps", "decay", "expected"),
    [
        (2, "constant", {1: 0.5, 2: 1.0, 6: 1.0, 99: 1.0}),
        (3, "linear", {1: 1 / 3, 3: 1.0, 7: 0.55, 10: 1 - 0.9 * 7 / 8, 11: 0.1, 99: 0.1}),
        (3, "cosine", {1: 1 / 3, 3: 1.0, 7: 0.55, 5: 0.1 + 0.9 * (1 + 2**-0.5) / 2, 11: 0.1, 99: 0.1}),
        (0, "constant", {1: 1.0}),
        (0, "linear", {1: 1.0, 6: 0.55, 10: 0.19, 11: 0.1}),
        (1, "linear", {1: 1.0, 6: 0.55, 10: 0.19, 11: 0.1}),
        (10, "cosine", {5: 0.5, 10: 1.0}),
    ],
)
def test_learning_rate(warmup_steps: int, decay: str, expected: dict[int, float]) -> None:
    config = LearnerConfig(steps=10, warmup_steps=warmup_steps, lr=2.0, min_lr_ratio=0.1, decay=decay)
    for step, share in expected.items():
        assert learning_rate(step, config) == pytest.approx(2.0 * share)


@given(
    steps=st.integers(1, 400),
    warmup=st.integers(0, 400),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    lr=st.sampled_from([None, 0.5]),
)
def test_every_step_has_a_rate_above_the_minimum_and_the_decay_ends_after_the_last(steps, warmup, decay, lr) -> None:
    warmup = min(warmup, steps)
    config = LearnerConfig(steps=steps, warmup_steps=warmup, lr=1.0, decay=decay)
    rates = [learning_rate(step, config) for step in range(1, steps + 1)]
    assert min(rates) > 0 and max(rates) == rates[max(0, warmup - 1)] == 1.0
    if decay != "constant":
        assert learning_rate(steps + 1, config) == pytest.approx(0.0)
    sft = SftConfig(data="x", warm_steps=steps, rise_steps=warmup, lr=lr)
    linear = config.model_copy(update={"decay": "linear", "lr": lr or 1.0})
    assert [warm_learning_rate(step, config, sft) for step in range(1, steps + 1)] == pytest.approx(
        [learning_rate(step, linear) for step in range(1, steps + 1)]
    )

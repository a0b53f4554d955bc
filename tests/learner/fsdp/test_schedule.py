from __future__ import annotations

import pytest

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.fsdp.schedule import learning_rate


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", {1: 0.5, 2: 1.0, 6: 1.0, 10: 1.0, 99: 1.0}),
        ("linear", {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1, 99: 0.1}),
        ("cosine", {1: 0.5, 2: 1.0, 6: 0.55, 4: 0.1 + 0.9 * (1 + 2**-0.5) / 2, 10: 0.1, 99: 0.1}),
    ],
)
def test_learning_rate(decay: str, expected: dict[int, float]) -> None:
    config = LearnerConfig(steps=10, warmup_steps=2, lr=2.0, min_lr_ratio=0.1, decay=decay)
    for step, share in expected.items():
        assert learning_rate(step, config) == pytest.approx(2.0 * share)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(1, LearnerConfig(lr=3.0)) == 3.0


def test_warm_up_through_the_last_step_does_not_divide_by_zero() -> None:
    config = LearnerConfig(steps=4, warmup_steps=4, lr=1.0, decay="cosine")
    assert [learning_rate(s, config) for s in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]

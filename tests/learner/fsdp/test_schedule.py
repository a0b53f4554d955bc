from __future__ import annotations

import pytest

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.fsdp.schedule import learning_rate


@pytest.mark.parametrize(
    ("warmup_steps", "decay", "expected"),
    [
        (2, "constant", {1: 0.5, 2: 1.0, 6: 1.0, 99: 1.0}),
        (2, "linear", {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1, 99: 0.1}),
        (2, "cosine", {1: 0.5, 2: 1.0, 6: 0.55, 4: 0.1 + 0.9 * (1 + 2**-0.5) / 2, 10: 0.1, 99: 0.1}),
        (0, "constant", {1: 1.0}),
        (10, "cosine", {5: 0.5, 10: 1.0}),
    ],
)
def test_learning_rate(warmup_steps: int, decay: str, expected: dict[int, float]) -> None:
    config = LearnerConfig(steps=10, warmup_steps=warmup_steps, lr=2.0, min_lr_ratio=0.1, decay=decay)
    for step, share in expected.items():
        assert learning_rate(step, config) == pytest.approx(2.0 * share)

"""Which routes a learner takes."""

from __future__ import annotations

import numpy as np
import pytest
from learner.learner_cases import make_group, make_sequence, make_trajectory

from asyncrl.messages.routes import Experts, check_routes

EXPERTS = Experts(layers=3, count=4, chosen=2)
PROMPT, TOKENS = [5, 6], [1, 2, 3]
RIGHT = np.zeros((4, 3, 2), np.uint8)


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (RIGHT, None),
        (RIGHT + np.uint8(3), None),
        (None, "no routes"),
        (RIGHT[:-1], r"uint8\[3, 3, 2\] instead of uint8\[4, 3, 2\]"),
        (RIGHT[:, :2], r"uint8\[4, 2, 2\] instead"),
        (RIGHT.astype(np.int32), "are int32"),
        (RIGHT + np.uint8(4), "expert 4, and the model has 4"),
    ],
)
def test_a_group_needs_the_routes_of_all_its_tokens(routes: np.ndarray | None, problem: str | None) -> None:
    good = make_trajectory(sequences=[make_sequence(TOKENS, routes=RIGHT)])
    other = make_trajectory(sequences=[make_sequence(TOKENS, routes=RIGHT), make_sequence(TOKENS, routes=routes)])
    found = check_routes(make_group(0, PROMPT, [good, other]), EXPERTS)
    if problem is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=f"sample 1: .*{problem}"):
            assert found is None, found


def test_a_sequence_with_a_prompt_of_its_own_has_routes_for_that_one() -> None:
    sequence = make_sequence(TOKENS, routes=np.zeros((5, 3, 2), np.uint8), prompt_ids=np.array([7, 8, 9], np.int32))
    assert check_routes(make_group(0, PROMPT, [make_trajectory(sequences=[sequence])]), EXPERTS) is None


def test_many_experts_need_wider_ids() -> None:
    assert Experts(layers=1, count=256, chosen=8).dtype is np.uint8
    assert Experts(layers=1, count=257, chosen=8).dtype is np.uint16

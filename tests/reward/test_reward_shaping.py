import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.reward.scoring.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (95, -0.75), (100, -1.0), (101, -1.0)]
)
def test_penalty_is_dapo_equation_13(tokens, expected):
    assert overlong_penalty(tokens, max_tokens=100, margin_tokens=20, scale=1.0) == pytest.approx(expected)


@given(tokens=st.integers(0, 300), margin=st.integers(1, 99), scale=st.floats(0, 10))
def test_penalty_never_rewards_and_never_exceeds_its_scale(tokens, margin, scale):
    penalty = overlong_penalty(tokens, max_tokens=100, margin_tokens=margin, scale=scale)
    longer = overlong_penalty(tokens + 1, max_tokens=100, margin_tokens=margin, scale=scale)
    assert -scale <= longer <= penalty <= 0

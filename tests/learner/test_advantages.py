from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.advantages import ESTIMATORS, dr_grpo, grpo, rloo

REWARDS = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=2, max_size=16)


@given(REWARDS)
def test_grpo_is_the_standardised_reward(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + 1e-6) for r in rewards]
    np.testing.assert_allclose(grpo(np.array(rewards)), expected, rtol=1e-9, atol=1e-6)


@given(REWARDS)
def test_dr_grpo_is_the_centred_reward(rewards: list[float]) -> None:
    expected = [r - statistics.fmean(rewards) for r in rewards]
    np.testing.assert_allclose(dr_grpo(np.array(rewards)), expected, atol=1e-9)


@given(REWARDS)
def test_rloo_leaves_its_own_reward_out_of_the_baseline(rewards: list[float]) -> None:
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(rloo(np.array(rewards)), expected, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_have_no_advantage_at_all(name: str) -> None:
    # 0.1 is no binary fraction: the mean of ten of them is not exactly 0.1.
    assert ESTIMATORS[name](np.full(10, 0.1)).tolist() == [0.0] * 10


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_what_has_no_advantage_is_refused(name: str, rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="reward"):
        ESTIMATORS[name](np.array(rewards))

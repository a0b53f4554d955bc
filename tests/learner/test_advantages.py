from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.advantages import ESTIMATORS, dr_grpo, grpo, rloo, turn_advantages

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


GROUPS = st.lists(
    st.tuples(
        st.integers(-50, 50).map(lambda r: r / 8), st.lists(st.integers(-16, 16).map(lambda r: r / 8), max_size=4)
    ),
    min_size=2,
    max_size=6,
)


@given(GROUPS)
def test_a_turn_has_its_return_against_the_baseline_and_scale_of_the_group(group) -> None:
    rewards = [reward for reward, _ in group]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    squares = [statistics.fmean((reward - past - mean) ** 2 for past in pasts) for reward, pasts in group if pasts]
    if any(past for _, pasts in group for past in pasts):
        std = max(std, (sum(squares) / (len(group) - 1)) ** 0.5)
    for name in ESTIMATORS:
        found = turn_advantages(name, np.array(rewards), [np.array(pasts, np.float64) for _, pasts in group])
        for i, (reward, pasts) in enumerate(group):
            baseline = statistics.fmean(rewards[:i] + rewards[i + 1 :]) if name == "rloo" else mean
            scale = std + 1e-6 if name == "grpo" else 1.0
            expected = [(reward - past - baseline) / scale for past in pasts]
            np.testing.assert_allclose(found[i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards=REWARDS)
def test_a_single_turn_has_the_advantage_of_its_trajectory_in_every_bit(name: str, rewards: list[float]) -> None:
    found = turn_advantages(name, np.array(rewards), [np.zeros(1)] * len(rewards))
    assert np.concatenate(found).tolist() == ESTIMATORS[name](np.array(rewards)).tolist()


@pytest.mark.parametrize("spread", [0.0, 1e-9])
def test_grpo_does_not_blow_up_turns_where_trajectories_all_but_agree(spread) -> None:
    found = turn_advantages("grpo", np.array([1.0, 1.0 + spread]), [np.array([0.0, 1.0])] * 2)
    assert np.abs(np.concatenate(found)).max() < 2.0

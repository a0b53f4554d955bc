from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import make_group, make_trajectory

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.advantages import BUILT_IN, ScoredGroup, has_signal
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.messages.groups import Group, Turn

BY_GROUP = ["grpo", "dr_grpo", "rloo"]


def make_scored(rewards, past=None, uid="g") -> ScoredGroup:
    past = [np.zeros(1)] * len(rewards) if past is None else [np.array(turns, np.float64) for turns in past]
    return ScoredGroup(uid, np.array(rewards, np.float64), past, np.ones(len(rewards), np.int64))


@given(st.lists(st.lists(st.integers(-800, 800).map(lambda r: r / 8), min_size=2, max_size=16), min_size=1, max_size=5))
def test_reinforce_has_the_mean_of_the_step_for_a_baseline(groups: list[list[float]]) -> None:
    mean = statistics.fmean(r for rewards in groups for r in rewards)
    found = BUILT_IN["reinforce"]([make_scored(rewards) for rewards in groups])
    for rewards, each in zip(groups, found, strict=True):
        np.testing.assert_allclose(np.concatenate(each), [r - mean for r in rewards], atol=1e-9)


@pytest.mark.parametrize("name", BY_GROUP)
def test_equal_rewards_have_no_advantage_and_invalid_ones_are_refused(name: str) -> None:
    # 0.1 is no binary fraction: the mean of ten of them is not exactly 0.1.
    assert np.concatenate(BUILT_IN[name]([make_scored([0.1] * 10)])[0]).tolist() == [0.0] * 10
    for rewards in ([1.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="group g"):
            BUILT_IN[name]([make_scored(rewards)])


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
    for name in BUILT_IN:
        (found,) = BUILT_IN[name]([make_scored(rewards, [pasts for _, pasts in group])])
        for i, (reward, pasts) in enumerate(group):
            baseline = statistics.fmean(rewards[:i] + rewards[i + 1 :]) if name == "rloo" else mean
            scale = std + 1e-6 if name == "grpo" else 1.0
            expected = [(reward - past - baseline) / scale for past in pasts]
            np.testing.assert_allclose(found[i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [0.0, 1e-9])
def test_grpo_bounds_turn_advantages_if_trajectories_almost_agree(spread) -> None:
    (found,) = BUILT_IN["grpo"]([make_scored([1.0, 1.0 + spread], [[0.0, 1.0]] * 2)])
    assert np.abs(np.concatenate(found)).max() < 2.0


def test_a_user_advantage_may_be_one_number_per_trajectory() -> None:
    advantage = find_advantage(LearnerConfig(advantage="losses_of_a_user:first_is_best"))
    (found,) = advantage([make_scored([0.0, 1.0], [[0.0, 0.5], [0.0]])])
    assert [turns.tolist() for turns in found] == [[1.0, 1.0], [0.0]]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda groups: [], "returned advantages of 0 groups, of 1 given"),
        (lambda groups: [[1.0]], "returned 1 advantages for the 2 trajectories of group g"),
        (lambda groups: [[np.zeros(3), 0.0]], r"shape \(3,\) for a trajectory of 1 turns in group g"),
        (lambda groups: [[float("nan"), 0.0]], "not finite for group g"),
    ],
)
def test_an_advantage_of_another_shape_is_refused(monkeypatch, made, said) -> None:
    import losses_of_a_user

    monkeypatch.setattr(losses_of_a_user, "first_is_best", made)
    advantage = find_advantage(LearnerConfig(advantage="losses_of_a_user:first_is_best"))
    with pytest.raises(ConfigError, match=said):
        advantage([make_scored([0.0, 1.0])])


def test_a_missing_advantage_function_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"learner\.advantage: there is no built-in advantage 'gpro'"):
        find_advantage(LearnerConfig(advantage="gpro"))


def _scored(*components: dict[str, float]) -> Group:
    return make_group(0, [1], [make_trajectory([7], reward=sum(c.values()), components=c) for c in components])


def _in_turns(*pasts: float) -> Group:
    turns = [Turn(i, i + 1, past) for i, past in enumerate(pasts)]
    return make_group(0, [1], [make_trajectory([1] * len(pasts), reward=1.0, turns=turns) for _ in range(2)])


RIGHT, WRONG = {"accuracy": 1.0}, {"accuracy": 0.0}
LONG = RIGHT | {"overlong_penalty": -0.1}


@pytest.mark.parametrize(
    ("group", "signal", "expected"),
    [
        (_scored({"r": 0.5}, {"r": 0.5 + 1e-7}), "reward", False),
        (_scored({"r": 0.5}, {"r": 0.5}, {"r": 0.6}), "reward", True),
        # Right answers; one is a little long.
        (_scored(RIGHT, LONG), "reward", False),
        (_scored(WRONG, LONG), "reward", True),
        (_scored(RIGHT | {"style": 0.3}, RIGHT | {"style": 0.9}), "accuracy", False),
        # One that ran over its time has a reward alone.
        (_scored(RIGHT, {"timed_out": 0.0}), "accuracy", True),
        (_scored({"timed_out": 0.0}, {"timed_out": 0.0}), "accuracy", False),
        (_in_turns(0.0, 0.5), "reward", True),
        (_in_turns(0.0, 1e-7), "reward", False),
        # Two agents that play the same episode: the rewards do not differ.
        (_in_turns(0.5, 0.5), "reward", False),
    ],
)
def test_a_group_has_a_signal_if_its_rewards_differ(group: Group, signal: str, expected: bool) -> None:
    assert has_signal(group, LearnerConfig(signal=signal)) == expected

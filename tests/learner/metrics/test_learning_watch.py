"""A run that cannot learn anything is told so, once and with the reason; one that learns is told nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import make_config

from asyncrl.learner.groups.notices import LEAST_GROUPS, STEPS, LearningWatch

GOOD = {
    **{"kind": "train", "loss/policy": -0.01, "policy/grad_norm": 0.4, "policy/entropy": 1.5, "learner/lr": 1e-3},
    **{"reward/mean": 0.5, "reward/std": 0.5, "rollout/truncated_fraction": 0.2},
}
STILL = GOOD | {"loss/policy": 0.0, "policy/grad_norm": 0.0}
SIM = {key: value for key, value in GOOD.items() if not key.startswith(("loss/", "policy/"))}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([GOOD] * 9, []),
        ([SIM] * 9, []),
        ([STILL] * (STEPS - 1), []),
        ([STILL] * 9, ["no gradient"]),
        (([STILL] * (STEPS - 1) + [GOOD]) * 4, []),
        # What a line does not have breaks the row.
        (([STILL] * (STEPS - 1) + [SIM]) * 4, []),
        ([STILL | {"policy/grad_norm": 1e-300}] * 9, []),
    ],
)
def test_what_the_last_steps_tell(lines, told):
    watch = LearningWatch(make_config())
    found = [notice for step, line in enumerate(lines, 1) for notice in watch.after_step(line | {"step": step})]
    assert [notice.key for notice in found] == told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 0.0}, ["learner.lr"]),
        ({"lr": 1e-12}, []),
        ({"lr": 1e-6, "warmup_steps": 1000}, []),
    ],
)
def test_without_a_learning_rate_it_is_told_at_the_start(settings, told):
    watch = LearningWatch(make_config(**settings))
    assert [notice.key for notice in watch.at_start()] == told
    assert watch.at_start() == []


def group(*rewards):
    return np.array(rewards, dtype=np.float64)


ZERO, ONE, MIXED = group(0, 0, 0), group(1, 1, 1), group(0, 1, 0)


@pytest.mark.parametrize(
    ("groups", "groups_per_step", "told"),
    [
        ([ZERO] * 35, 12, []),
        ([ZERO] * 36, 12, ["0.000"]),
        ([group(1e300, 1e300)] * 99, 12, ["1e+300"]),
        # One right answer now and then is a signal.
        (([ZERO] * 35 + [MIXED]) * 4, 12, []),
        # Groups that are all right and others that are all wrong differ from one another.
        (([ZERO] * 3 + [ONE]) * 50, 12, []),
        # Rewards that creep are not equal, though each is as good as equal to the one before.
        ([group(n * 9e-7, n * 9e-7) for n in range(99)], 12, []),
        ([ZERO] * (LEAST_GROUPS - 1), 1, []),
        ([ZERO] * LEAST_GROUPS, 1, ["0.000"]),
    ],
)
def test_equal_rewards_are_told_with_their_value(groups, groups_per_step, told):
    watch = LearningWatch(make_config(groups_per_step=groups_per_step))
    found = [notice for rewards in groups for notice in watch.group_came(rewards, filtered=0)]
    assert [notice.key for notice in found] == ["equal rewards"] * len(told)
    for notice, value in zip(found, told, strict=True):
        assert f"is {value}: nothing is learnt" in notice.text and "reward.function" in notice.text


@pytest.mark.parametrize(("filtered", "told"), [(39, []), (40, ["mostly filtered"])])
def test_before_a_run_ends_for_want_of_a_signal_it_is_told(filtered, told):
    watch = LearningWatch(make_config(groups_per_step=8, max_filtered_ratio=10.0))
    found = [notice for n in range(1, filtered + 1) for notice in watch.group_came(MIXED, filtered=n)]
    assert [notice.key for notice in found] == told
    if found:
        assert "40 groups were filtered" in found[0].text and "once 80 (learner.max_filtered_ratio" in found[0].text


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_run_that_learns_is_told_nothing(chances, random):
    """A binary reward whose chance wanders: as long as a group in a step differs within itself."""
    watch = LearningWatch(make_config(groups_per_step=8))
    found = watch.at_start()
    for step, chance in enumerate(chances, 1):
        for _ in range(7):
            found += watch.group_came(group(*[float(random.random() < chance)] * 4), filtered=0)
        found += watch.group_came(MIXED, filtered=0)
        found += watch.after_step(GOOD | {"step": step})
    assert found == []

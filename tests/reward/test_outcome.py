import math
import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.reward import BadOutcome, read_outcome, read_outcomes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, (1.5, {})),
        (0, (0.0, {})),
        (True, (1.0, {})),
        (np.float32(0.25), (0.25, {})),
        (np.int64(3), (3.0, {})),
        (np.array(2.0), (2.0, {})),
        ({"format": 0.5, "answer": 1}, (1.5, {"format": 0.5, "answer": 1.0})),
        ({"reward": 0.1, "format": 0.5}, (0.1, {"format": 0.5})),
        ({"reward": 0}, (0.0, {})),
        ({f"{n}": 0.0 for n in range(64)} | {"reward": 1.0}, (1.0, {f"{n}": 0.0 for n in range(64)})),
        ({"x" * 100: 1.0}, (1.0, {"x" * 100: 1.0})),
        (MappingProxyType({"a": np.float32(1)}), (1.0, {"a": 1.0})),
    ],
)
def test_a_number_or_a_mapping_of_numbers_is_a_reward(value: Any, expected: Any) -> None:
    reward, components = read_outcome(value)
    assert (reward, components) == expected
    assert type(reward) is float
    assert all(type(component) is float for component in components.values())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "None"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (np.float32("nan"), "nan"),
        ("1.0", "str '1.0'"),
        (1j, "complex"),
        ([1.0], "list"),
        (np.array([1.0]), "ndarray"),
        (10**400, "int"),
        ({}, "empty"),
        ({"a": None}, "'a'"),
        ({1: 1.0}, "key 1"),
        ({"a": 1.0, "\ud83d": 1.0}, r"key '\ud83d', which holds half of a surrogate pair"),
        ({"reward": None}, "'reward'"),
        ({"a": 6e17, "b": 6e17}, "sum is 1.2e+18"),
        (-1e300, "returned -1e+300; a number of a magnitude up to 1e+18"),
        ({"a": 1e19}, "'a' 1e+19"),
        ({"a": {"b": 1.0}}, "'a'"),
        (object, "type"),
        ({f"word {n}": 1.0 for n in range(65)}, "a mapping of 65 components, 64 are allowed: each becomes a metric"),
        ({"x" * 101: 1.0}, "a component whose name has 101 characters, 100 are allowed"),
    ],
)
def test_any_other_reward_is_an_error_that_names_it(value: Any, named: str) -> None:
    with pytest.raises(BadOutcome, match=re.escape(named)) as caught:
        read_outcome(value)
    assert len(str(caught.value)) < 500


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
)
def test_accepted_rewards_are_finite(value: Any) -> None:
    try:
        reward, components = read_outcome(value)
    except BadOutcome:
        return
    assert math.isfinite(reward)
    assert all(math.isfinite(component) for component in components.values())


def test_a_group_returns_one_reward_each() -> None:
    for value in ([1, {"a": 2}], (1, {"a": 2})):
        assert read_outcomes(value, 2) == [(1.0, {}), (2.0, {"a": 2.0})]
    assert read_outcomes(np.array([0.5, 1.0]), 2) == [(0.5, {}), (1.0, {})]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([1.0], "1 rewards for a group of 2"),
        (1.0, "float 1.0 for a group"),
        ({"a": 1.0, "b": 2.0}, "for a group"),
        ([1.0, None], "None"),
        (np.ones((2, 2)), "ndarray"),
    ],
)
def test_any_other_reward_of_a_group_is_an_error(value: Any, named: str) -> None:
    with pytest.raises(BadOutcome, match=re.escape(named)):
        read_outcomes(value, 2)

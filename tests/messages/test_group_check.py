"""Groups that cannot be trained: every invariant of a sequence, each broken once, is named with its sample."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from learner.learner_cases import build_step, make_config, make_group, make_sequence, make_trajectory, random_groups

from asyncrl.core.truncation import Truncation
from asyncrl.messages.groups import Group, Turn, VersionSpan, check_group
from asyncrl.messages.token_sets import make_sets


def pair(**fields: Any) -> Group:
    """A good trajectory and another one of these fields."""
    return make_group(7, [1], [make_trajectory([1, 2], reward=1.0), make_trajectory([1, 2], **fields)])


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logprobs": logprobs(-1.0, float("nan"))}, "log-prob"),
        ({"logprobs": logprobs(-1.0, 0.5)}, "log-prob"),
        ({"logprobs": logprobs(-1.0)}, "2 sampled tokens, 1 log-probs"),
        ({"spans": [VersionSpan(0, 0, 1)]}, "spans"),
        ({"spans": [VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)]}, "spans"),
        ({"spans": [VersionSpan(0, 0, 1), VersionSpan(1, 1, 1), VersionSpan(1, 1, 2)]}, "spans"),
        ({"spans": [VersionSpan(-1, 0, 2)]}, "tokens 0 to 2 are sampled and of version -1"),
        ({"spans": [VersionSpan(0, 0, 1), VersionSpan(3, 1, 2, role="repeated")]}, "are repeated and of version 3"),
        ({"roles": "cs"}, "first token is context"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt is empty"),
        ({"turns": [Turn(1, 2), Turn(0, 1)]}, "turns"),
        ({"turns": [Turn(0, 2), Turn(1, 2)]}, "turns"),
        ({"turns": [Turn(0, 1), Turn(1, 1), Turn(1, 2)]}, "turns"),
        ({"roles": "sc", "turns": [Turn(0, 2)]}, "turns"),
        ({"turns": [Turn(0, 2, float("inf"))]}, "past reward"),
        ({"reward": None}, "reward"),
        ({"reward": float("nan")}, "reward"),
    ],
)
def test_a_broken_group_is_named_before_it_is_trained(fields, problem) -> None:
    group = pair(**fields)
    found = check_group(group)
    assert found is not None
    assert problem in found
    assert "sample 1" in found
    with pytest.raises(ValueError, match="group 0-7 cannot be trained: sample 1"):
        build_step([group], version=0, config=make_config(), world_size=1, packed=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"turns": [Turn(0, 1), Turn(1, 2, -3.0)]},
        {"turns": [Turn(0, 2)], "version": [0, 1]},
        {"roles": "rs", "turns": [Turn(1, 2)]},
        {"roles": "rr"},
        {"prompt_ids": np.ones(1, np.int32)},
    ],
)
def test_a_valid_group_passes_the_check(fields) -> None:
    assert check_group(pair(**fields)) is None
    assert all(check_group(group) is None for group in random_groups(3, 8))


@pytest.mark.parametrize(
    ("truncated", "sets", "problem"),
    [
        (False, None, None),
        (True, [[1, 4], [2]], None),
        (True, None, "it has no token sets"),
        (False, [[1, 4], [2]], "its lease truncates nothing"),
        (True, [[1, 4]], "2 sampled tokens, 1 token sets"),
        (True, [[1, 4], [3]], "sampled token 1 is not in its token set"),
    ],
)
def test_the_sets_of_truncated_distributions_are_checked(truncated, sets, problem) -> None:
    group = make_group(7, [1], [make_trajectory([1, 9, 2], roles="scs") for _ in range(2)])
    lease = msgspec.structs.replace(group.lease, truncation=Truncation(top_k=4) if truncated else None)
    for trajectory in group.trajectories:
        trajectory.sequences[0].sets = None if sets is None else make_sets(sets)
    found = check_group(msgspec.structs.replace(group, lease=lease))
    assert found is None if problem is None else problem in str(found)


def test_a_whole_group_is_checked_and_the_broken_sequence_is_named() -> None:
    two = [make_trajectory([1]), make_trajectory([2])]
    assert "at least 2" in str(check_group(make_group(0, [1], two[:1])))
    assert "empty" in str(check_group(make_group(0, [], two)))
    assert "no tokens" in str(check_group(make_group(0, [1], [make_trajectory([]), two[0]])))
    group = make_group(0, [1], two)
    two[1].sequences.append(make_sequence([1, 2], roles="cs"))
    assert check_group(group) == "sample 1: sequence 1: its first token is context, which belongs to its prompt"
    two[1].sequences.clear()
    assert check_group(group) == "sample 1: no sequences"

"""The ledger: one outcome for each prompt, kept as intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.ledger import IntervalSet, Kind, Ledger, position_of
from asyncrl.messages.groups import EpochIntervals, LedgerState
from asyncrl.wire.codec import Codec

OUTCOMES = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 30)), st.sampled_from(["trained", "filtered", "quarantined"])
)


def made(outcomes: dict[tuple[int, int], Kind]) -> Ledger:
    ledger = Ledger()
    for (epoch, index), kind in outcomes.items():
        ledger.record(kind, epoch, index)
    return ledger


@given(outcomes=OUTCOMES, attempts=st.dictionaries(st.sampled_from(["0-40", "a@3-1"]), st.integers(1, 9)))
def test_i1_a_ledger_goes_over_the_wire_and_comes_back_as_it_was(
    outcomes: dict[tuple[int, int], Kind], attempts: dict[str, int]
) -> None:
    ledger = made(outcomes)
    ledger.attempts, ledger.first_epoch = attempts, 2
    ledger.requeues = {uid: count + 1 for uid, count in attempts.items()}
    codec = Codec()
    body, *buffers = codec.encode(ledger.state)
    again = Ledger.restore(codec.decode(LedgerState, body, buffers))
    assert (again.attempts, again.requeues, again.first_epoch) == (attempts, ledger.requeues, 2)
    assert again.state == ledger.state
    for epoch in range(4):
        for index in range(32):
            assert again.outcome(epoch, index) == outcomes.get((epoch, index))
    assert [again.concluded(epoch) for epoch in range(4)] == [
        sum(e == epoch for e, _ in outcomes) for epoch in range(4)
    ]
    assert again.epochs == sorted({epoch for epoch, _ in outcomes})


@given(outcomes=OUTCOMES, more=st.integers(31, 35))
def test_many_prompts_are_looked_up_like_one(outcomes: dict[tuple[int, int], Kind], more: int) -> None:
    ledger = made(outcomes)
    indices = np.arange(40, dtype=np.int64)[::-1]
    for value in (more, more + 1):
        for epoch in range(4):
            found = ledger.concluded_among(epoch, indices).tolist()
            assert found == [ledger.outcome(epoch, int(index)) is not None for index in indices]
        ledger.record("trained", 0, value)


def test_a_state_is_of_the_moment_it_was_taken() -> None:
    ledger = made({(0, 1): "trained"})
    ledger.attempts["0-2"] = ledger.requeues["0-2"] = 1
    state = ledger.state
    ledger.record("filtered", 0, 2)
    assert (state.attempts, ledger.attempts) == ({"0-2": 1}, {})
    assert (state.requeues, ledger.requeues) == ({"0-2": 1}, {})
    assert Ledger.restore(state).outcome(0, 2) is None


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([("trained", 0, [3])], "not intervals"),
        ([("trained", 0, [3, 3])], "not ascending"),
        ([("trained", 0, [5, 6, 3, 4])], "not ascending"),
        ([("trained", 0, [3, 4]), ("trained", 0, [5, 6])], "there twice"),
        ([("trained", 0, [3, 5]), ("filtered", 0, [4, 6])], "two outcomes"),
        ([("lost", 0, [3, 5])], "not intervals"),
    ],
)
def test_what_is_no_ledger_is_refused(items: list[tuple[str, int, list[int]]], match: str) -> None:
    state = LedgerState(outcomes=[EpochIntervals(kind=k, epoch=e, bounds=b) for k, e, b in items])
    with pytest.raises(ValueError, match=match):
        Ledger.restore(state)


def test_a_value_is_added_once() -> None:
    values = IntervalSet()
    values.add(3)
    with pytest.raises(AssertionError):
        values.add(3)


@pytest.mark.parametrize("uid", ["", "x", "a@3-1", "1", "1-", "-"])
def test_only_the_uid_of_a_training_prompt_has_a_position(uid: str) -> None:
    assert position_of("12-345") == (12, 345)
    with pytest.raises(ValueError, match="invalid literal"):
        position_of(uid)

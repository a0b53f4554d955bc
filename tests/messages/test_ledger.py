"""The ledger: one outcome for each prompt, in any order. Its size is that of the open epochs."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages.ledger import (
    KINDS,
    MAX_PROMPTS,
    ConcludedEpochs,
    Kind,
    Ledger,
    LedgerState,
    position_of,
)
from asyncrl.rpc.wire.codec import Codec

Outcomes = dict[tuple[int, int], Kind]
POSITIONS = st.tuples(st.integers(0, 5), st.integers(0, 20))
OUTCOMES = st.one_of(
    st.dictionaries(POSITIONS, st.sampled_from(KINDS)),
    # Whole epochs of equal size in any order, and outcomes beyond some of them.
    st.builds(
        lambda size, kinds, more: {(at // size, at % size): kind for at, kind in kinds} | more,
        st.sampled_from([3, 8, 13, 16]),
        st.permutations(list(zip(range(64), (KINDS * 22)[:64], strict=True))),
        st.dictionaries(POSITIONS, st.just("filtered"), max_size=2),
    ),
)


def made(outcomes: Outcomes) -> Ledger:
    ledger = Ledger()
    for (epoch, index), kind in outcomes.items():
        ledger.record(kind, epoch, index)
    return ledger


def holds(ledger: Ledger, outcomes: Outcomes) -> None:
    """The ledger and a plain dict give the same answers, and epochs that ended alike share one entry."""
    indices = np.arange(32, dtype=np.int64)[::-1]
    for epoch in range(24):
        expected = [(epoch, int(index)) in outcomes for index in indices]
        assert [not ledger.is_open(epoch, int(index)) for index in indices] == expected
        assert ledger.concluded_among(epoch, indices).tolist() == expected
        assert ledger.concluded(epoch) == sum(expected)
    assert [ledger.count(kind) for kind in KINDS] == [list(outcomes.values()).count(kind) for kind in KINDS]
    assert ledger.next_epoch == max((epoch + 1 for epoch, _ in outcomes), default=0)
    for item in ledger.state.concluded:
        assert not item.bits.startswith(b"\xff") and not item.bits.endswith(b"\0") and item.below % 8 == 0
        assert item.epochs == 1 or len(item.bits) <= 1
    for left, right in pairwise(ledger.state.concluded):
        alike = (left.below, left.bits) == (right.below, right.bits) and len(left.bits) <= 1
        assert left.first + left.epochs + alike <= right.first


@settings(max_examples=examples(60))
@given(
    OUTCOMES, st.randoms(use_true_random=False), st.dictionaries(st.sampled_from(["0-40", "a@3-1"]), st.integers(1, 9))
)
def test_i1_a_ledger_answers_like_a_dict_also_after_the_wire_and_disk(
    outcomes: Outcomes, random: Random, attempts: dict[str, int]
) -> None:
    ledger = made(outcomes)
    holds(ledger, outcomes)
    # The order of the outcomes leaves no trace.
    shuffled = random.sample(list(outcomes.items()), len(outcomes))
    assert ledger.state == made(dict(shuffled)).state
    ledger.attempts, ledger.first_epoch = attempts, 2
    codec = Codec()
    body, *buffers = codec.encode(ledger.state)
    on_disk = msgspec.json.encode(ledger.state)
    for state in (codec.decode(LedgerState, body, buffers), msgspec.json.decode(on_disk, type=LedgerState)):
        again = Ledger.restore(state)
        assert (again.attempts, again.first_epoch) == (attempts, 2)
        assert again.state == ledger.state
        again.record("trained", 5, 30)
        holds(again, outcomes | {(5, 30): "trained"})
        assert again.state != state, "a state is of the moment it was taken"


def test_i1_a_prompt_of_an_epoch_has_one_outcome() -> None:
    ledger = made({(0, 5): "trained", (1, 5): "filtered"})
    ledger.attempts["0-6"] = 1
    for kind in KINDS:
        with pytest.raises(AssertionError, match="0-5 has an outcome"):
            ledger.record(kind, 0, 5)
    ledger.record("filtered", 0, 6)
    assert [ledger.count(kind) for kind in KINDS] == [1, 2, 0, 0, 0]
    assert ledger.attempts == {}


# --- size ---


def finished(epochs: int, size: int) -> Ledger:
    """A ledger in which these epochs are over, with half of their prompts filtered."""
    half = epochs * size // 2
    more = size % 8
    runs = [ConcludedEpochs(first=0, epochs=epochs, below=size - more, bits=bytearray([2**more - 1] if more else []))]
    counts: dict[Kind, int] = {"trained": epochs * size - half, "filtered": half, "quarantined": 0}
    return Ledger.restore(LedgerState(concluded=runs, counts=counts))


@pytest.mark.parametrize("size", [1, 7, 8, 501])
def test_ended_epochs_use_no_memory_for_any_order_of_outcomes(size: int) -> None:
    """Added one by one they reach the form of ``finished``: any number of such epochs is as small."""
    ledger = Ledger()
    for epoch in range(6):
        for at, index in enumerate(np.random.default_rng(epoch).permutation(size).tolist()):
            ledger.record(KINDS[at % 2], epoch, index)
        assert len(ledger.state.concluded) == 1
    assert ledger.state.concluded == finished(6, size).state.concluded


@pytest.mark.parametrize(("epochs", "size"), [(10, 1_000_000), (100_000, 100)])
def test_the_ledger_has_a_bit_per_prompt_of_the_open_epoch_at_ten_million_groups(epochs: int, size: int) -> None:
    """With one more epoch in progress, in shuffled order."""
    ledger = finished(epochs, size)
    assert len(msgspec.json.encode(ledger.state)) < 300
    for at, index in enumerate(np.random.default_rng(0).permutation(size)[:20_000].tolist()):
        ledger.record(KINDS[at % 2], epochs, index)
    assert len(msgspec.json.encode(ledger.state)) <= 400 + size / 8 * 4 / 3
    assert Ledger.restore(ledger.state).state == ledger.state


class Counted(bytearray):
    """Counts the bytes that are moved or read one by one."""

    touched = 0

    def __setitem__(self, at: Any, value: Any) -> None:
        self.touched += 1
        super().__setitem__(at, value)

    def __delitem__(self, at: Any) -> None:
        # The front is dropped without moving the rest.
        assert at.start is None
        self.touched += at.stop
        super().__delitem__(at)

    def extend(self, more: Any) -> None:
        self.touched += len(more)
        super().extend(more)

    def __iter__(self) -> Any:
        raise AssertionError("all of it is looked at")


@pytest.mark.parametrize("order", ["shuffled", "descending", "window"])
def test_an_outcome_costs_the_same_in_an_epoch_of_any_size(order: str) -> None:
    """Over an epoch every byte is written once a bit, made once and dropped once: no outcome moves the others."""
    size = 32_000
    orders = {
        "shuffled": np.random.default_rng(0).permutation(size),
        "descending": np.arange(size)[::-1],
        "window": np.arange(size).reshape(-1, 160)[:, ::-1].reshape(-1),
    }
    bits = Counted()
    values = ConcludedEpochs(first=0, epochs=1, below=0, bits=bits)
    longest = 0
    for value in orders[order].tolist():
        values.add(value)
        longest = max(longest, len(values.bits))
    assert (values.below, values.bits) == (size, b"")
    assert bits.touched == size + 2 * size // 8
    assert longest <= (21 if order == "window" else size // 8)


# --- refused ledgers ---


@pytest.mark.parametrize(
    ("runs", "trained", "match"),
    [
        ([(0, 2, 8, b""), (1, 1, 8, b"")], 24, "not ascending"),
        ([(0, 1, 8, b"\xff")], 16, "not the prompts"),
        ([(0, 1, 8, b"\x01\x00")], 9, "not the prompts"),
        ([(0, 1, 3, b"\x02")], 4, "not the prompts"),
        ([(0, 1, 0, b"")], 0, "not the prompts"),
        ([(0, 0, 8, b"")], 0, "not the prompts"),
        ([(0, 2, 8, b"\x01\x01")], 20, "not the prompts"),
        ([(0, 2, 8, b"\x01")], 17, "18 prompts have an outcome, and 17"),
    ],
)
def test_invalid_sets_are_refused(runs: list[tuple[int, int, int, bytes]], trained: int, match: str) -> None:
    concluded = [ConcludedEpochs(first=f, epochs=e, below=b, bits=bytearray(bits)) for f, e, b, bits in runs]
    with pytest.raises(ValueError, match=match):
        Ledger.restore(LedgerState(concluded=concluded, counts={"trained": trained}))


@pytest.mark.parametrize("uid", ["", "x", "a@3-1", "1-", "1--5", "-1-5", f"0-{MAX_PROMPTS}"])
def test_only_the_uid_of_a_training_prompt_has_a_position(uid: str) -> None:
    assert position_of("12-345") == (12, 345)
    with pytest.raises(ValueError, match=r"invalid literal|no uid"):
        position_of(uid)

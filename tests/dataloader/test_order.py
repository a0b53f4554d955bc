"""The order of prompts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.order import EpochOrder

EPOCHS = 3
PINNED = [7, 9, 0, 2, 5, 4, 3, 1, 8, 6]


def epoch(order: EpochOrder, number: int) -> list[int]:
    return [order.at(number * order.size + offset)[1] for offset in range(order.size)]


@given(fingerprint=st.text(max_size=20), seed=st.integers(0), size=st.integers(1, 60), number=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(fingerprint: str, seed: int, size: int, number: int) -> None:
    order = EpochOrder(fingerprint, seed, size)
    assert sorted(epoch(order, number)) == list(range(size))
    assert {order.at(number * size + offset)[0] for offset in range(size)} == {number}


@given(
    seed=st.integers(0, 5),
    size=st.integers(1, 300),
    number=st.integers(0, 3),
    shuffle=st.booleans(),
    start=st.integers(0, 299),
)
def test_position_undoes_at_and_many_are_looked_up_like_one(
    seed: int, size: int, number: int, shuffle: bool, start: int
) -> None:
    order = EpochOrder("f", seed, size, shuffle=shuffle)
    start %= size
    indices = order.indices(number, start, start + 50).tolist()
    assert indices == [order.at(number * size + offset)[1] for offset in range(start, min(start + 50, size))]
    assert [order.position(number, index) for index in indices] == [
        number * size + offset for offset in range(start, start + len(indices))
    ]


def test_depends_on_fingerprint_seed_and_epoch_alone() -> None:
    order = EpochOrder("a", 1, 100)
    forwards = [order.at(position) for position in range(300)]
    backwards = [EpochOrder("a", 1, 100).at(position) for position in reversed(range(300))]
    assert forwards == backwards[::-1]
    orders = [epoch(order, number) for number in range(EPOCHS)]
    orders += [epoch(EpochOrder("b", 1, 100), 0), epoch(EpochOrder("a", 2, 100), 0)]
    assert len({tuple(each) for each in orders}) == len(orders)


def test_stays_the_same_from_release_to_release() -> None:
    # A run that is resumed by another version of the library must go on in the same order.
    assert epoch(EpochOrder("fingerprint", 7, 10), 2) == PINNED


def test_all_permutations_are_about_equally_likely() -> None:
    seen = Counter(tuple(epoch(EpochOrder("f", seed, 4), 0)) for seed in range(1200))
    assert len(seen) == 24
    # 50 expected of each; five standard deviations.
    assert max(abs(count - 50) for count in seen.values()) < 35


def test_as_it_stands_without_shuffle() -> None:
    order = EpochOrder("f", 0, 4, shuffle=False)
    assert [order.at(position) for position in range(6)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]

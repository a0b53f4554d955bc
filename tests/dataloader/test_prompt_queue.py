"""The order of prompts, and which training prompt is next."""

from __future__ import annotations

from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.prompt_queue import PromptQueue, PromptSource
from asyncrl.messages.ledger import Ledger


def epoch(order: EpochOrder, number: int) -> list[int]:
    return [order.at(number * order.size + offset)[1] for offset in range(order.size)]


@settings(max_examples=examples(50))
@given(st.text(max_size=20), st.integers(0), st.integers(1, 60), st.integers(0, 2**40), st.booleans(), st.integers(0))
def test_every_epoch_is_an_invertible_permutation(
    fingerprint: str, seed: int, size: int, number: int, shuffle: bool, start: int
) -> None:
    order = EpochOrder(fingerprint, seed, size, shuffle=shuffle)
    found = epoch(order, number)
    assert sorted(found) == list(range(size))
    assert shuffle or found == list(range(size))
    assert {order.at(number * size + offset)[0] for offset in range(size)} == {number}
    assert [order.position(number, index) - number * size for index in found] == list(range(size))
    start %= size
    assert order.indices(number, start, start + 50).tolist() == found[start : start + 50]


def test_the_order_depends_only_on_fingerprint_seed_and_epoch() -> None:
    order = EpochOrder("a", 1, 100)
    orders = [epoch(order, number) for number in range(3)]
    orders += [epoch(EpochOrder("b", 1, 100), 0), epoch(EpochOrder("a", 2, 100), 0)]
    assert len({tuple(each) for each in orders}) == len(orders)
    # A run that is resumed by another version of the library must continue in the same order.
    assert epoch(EpochOrder("fingerprint", 7, 10), 2) == [7, 9, 0, 2, 5, 4, 3, 1, 8, 6]


def make_queue(*oversize: int, size: int = 3, ledger: Ledger | None = None) -> PromptQueue:
    source = PromptSource(EpochOrder("f", 0, size, shuffle=False), frozenset(oversize))
    return PromptQueue([source], ledger or Ledger())


def take(queue: PromptQueue, count: int) -> list[str]:
    return [queue.take().uid for _ in range(count)]


def test_returned_prompts_go_first_the_oldest_before_the_others() -> None:
    queue = make_queue()
    first, second, third = (queue.take() for _ in range(3))
    queue.give_back(third)
    queue.give_back(first)
    assert take(queue, 3) == [first.uid, third.uid, "1-0"]
    queue.give_back(second)
    assert queue.take() == second


def test_oversize_prompts_are_passed_over_and_named_until_they_are_reported() -> None:
    queue = make_queue(1)
    assert take(queue, 4) == ["0-0", "0-2", "1-0", "1-2"]
    assert list(queue.rejected) == ["0-1", "1-1"]
    queue.finish("left_out", 0, 1)
    assert list(queue.rejected) == ["1-1"]
    assert queue.rejections == 2


def test_known_prompts_are_skipped_and_finished_epochs_are_not_read() -> None:
    ledger = Ledger()
    for number in range(1000):
        for index in range(2):
            ledger.record("trained", number, index)
    ledger.record("quarantined", 1000, 0)
    assert take(make_queue(size=2, ledger=ledger), 2) == ["1000-1", "1001-0"]


def test_a_prompt_is_held_only_once_and_only_before_its_turn() -> None:
    queue = make_queue(2)
    queue.finish("filtered", 0, 0)
    assert [queue.hold(0, index) is not None for index in (0, 1, 1, 3)] == [False, True, False, False]
    assert queue.ahead(1)[0].uid == "1-0"


def test_epochs_of_other_prompts_are_never_resumed() -> None:
    ledger = Ledger()
    ledger.record("trained", 0, 0)
    ledger.first_epoch = 2
    queue = make_queue(ledger=ledger)
    old = queue.hold(1, 77)
    assert old is not None
    assert take(queue, 1) == ["2-0"]
    queue.give_back(old)
    assert take(queue, 1) == ["2-1"]
    queue.finish("trained", 1, 77)
    assert not ledger.is_open(1, 77)

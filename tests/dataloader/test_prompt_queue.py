"""Which training prompt is next."""

from __future__ import annotations

from asyncrl.data.order import EpochOrder
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.ledger import Ledger


def make_queue(size: int = 3, *oversize: int) -> PromptQueue:
    return PromptQueue(EpochOrder("f", 0, size, shuffle=False), Ledger(), frozenset(oversize))


def test_what_came_back_goes_first_and_the_oldest_of_it_first_of_all() -> None:
    queue = make_queue()
    first, second, third = (queue.take() for _ in range(3))
    queue.give_back(third)
    queue.give_back(first)
    assert [queue.take().uid for _ in range(3)] == [first.uid, third.uid, "1-0"]
    queue.give_back(second)
    assert queue.take() == second


def test_oversize_prompts_are_passed_over_and_named_until_they_are_reported() -> None:
    queue = make_queue(3, 1)
    assert [queue.take().uid for _ in range(4)] == ["0-0", "0-2", "1-0", "1-2"]
    assert list(queue.rejected) == ["0-1", "1-1"]
    queue.finish("quarantined", 0, 1)
    assert list(queue.rejected) == ["1-1"]
    assert queue.rejections == 2


def test_what_the_ledger_knows_is_passed_over_and_finished_epochs_are_not_looked_at() -> None:
    ledger = Ledger()
    for epoch in range(5000):
        for index in range(2):
            ledger.record("trained", epoch, index)
    ledger.record("quarantined", 5000, 0)
    queue = PromptQueue(EpochOrder("f", 0, 2, shuffle=False), ledger)
    assert [queue.take().uid for _ in range(2)] == ["5000-1", "5001-0"]


def test_a_prompt_is_held_only_once_and_only_while_it_is_to_come() -> None:
    queue = make_queue(3, 2)
    queue.finish("filtered", 0, 0)
    assert queue.hold(0, 0) is None
    assert queue.hold(0, 1) is not None
    assert queue.hold(0, 1) is None
    assert queue.hold(0, 3) is None
    assert queue.ahead(1)[0].uid == "1-0"


def test_epochs_of_other_prompts_are_left_for_good() -> None:
    ledger = Ledger()
    ledger.record("trained", 0, 0)
    ledger.first_epoch = 2
    queue = PromptQueue(EpochOrder("f", 0, 3, shuffle=False), ledger)
    old = queue.hold(1, 77)
    assert old is not None
    assert queue.take().uid == "2-0"
    queue.give_back(old)
    assert queue.take().uid == "2-1"
    queue.finish("trained", 1, 77)
    assert not ledger.is_open(1, 77)

"""Which training prompt is next."""

from __future__ import annotations

import pytest

from asyncrl.dataloader.order import EpochOrder
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.ledger import Ledger


def make_queue(size: int = 3, *oversize: int) -> PromptQueue:
    return PromptQueue(EpochOrder("f", 0, size, shuffle=False), Ledger(), frozenset(oversize))


def test_epochs_stream_into_one_another() -> None:
    queue = make_queue()
    assert [queue.take().uid for _ in range(5)] == ["0-0", "0-1", "0-2", "1-0", "1-1"]


def test_what_came_back_goes_first_and_the_oldest_of_it_first_of_all() -> None:
    queue = make_queue()
    first, second, third = (queue.take() for _ in range(3))
    queue.give_back(third)
    queue.give_back(first)
    assert [queue.take().uid for _ in range(3)] == [first.uid, third.uid, "1-0"]
    queue.give_back(second)
    assert queue.take() == second


def test_a_returned_prompt_that_is_finished_meanwhile_is_not_taken_again() -> None:
    queue = make_queue()
    prompt = queue.take()
    queue.give_back(prompt)
    queue.finish("filtered", 0, 0)
    assert queue.take().uid == "0-1"


def test_oversize_prompts_are_passed_over_and_named_until_they_are_reported() -> None:
    queue = make_queue(3, 1)
    assert [queue.take().uid for _ in range(4)] == ["0-0", "0-2", "1-0", "1-2"]
    assert list(queue.rejected) == ["0-1", "1-1"]
    queue.finish("quarantined", 0, 1)
    assert list(queue.rejected) == ["1-1"]
    assert queue.rejections == 2


def test_a_prompt_comes_back_only_once() -> None:
    queue = make_queue()
    prompt = queue.take()
    queue.give_back(prompt)
    with pytest.raises(AssertionError):
        queue.give_back(prompt)


def test_a_queue_without_any_prompt_to_grant_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        make_queue(2, 0, 1)

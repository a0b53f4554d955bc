"""The ticket book, event by event. Arbitrary orders of events are in test_tickets_model."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.data.order import EpochOrder
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.holders import Ask, Grant
from asyncrl.dataloader.limit import WorkingLimit
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.dataloader.tickets import Tickets
from asyncrl.errors import ProtocolError
from asyncrl.ledger import Ledger
from asyncrl.messages.dataloader import Outcome, Outcomes
from asyncrl.messages.rollouter import HeldTicket, TicketsHeld

A, B = "rollouter/0", "rollouter/1"


class Book:
    """A ticket book and the numbers of its learner's reports."""

    def __init__(
        self,
        *,
        staleness_max: int = 1,
        groups: int = 4,
        steps: int = 100,
        size: int = 100,
        oversize: frozenset[int] = frozenset(),
        evals: tuple[EvalSet, ...] = (),
    ) -> None:
        limit = WorkingLimit(
            groups_per_step=groups, groups_per_version=groups, staleness_max=staleness_max, adapt=False
        )
        gate = Gate(limit, groups_per_version=groups, groups_left=steps * groups)
        order = EpochOrder("f", 0, size, shuffle=False)
        self.ledger = Ledger()
        queue = PromptQueue(order, self.ledger, oversize)
        self.tickets = Tickets(queue, gate, EvalRounds(evals), max_attempts=3)
        self.number = 0

    def lease(
        self,
        name: str = A,
        free: int = 4,
        *,
        seen: int = 0,
        served: int = 0,
        incarnation: int = 1,
        holding: tuple[str, ...] = (),
    ) -> list[Grant]:
        ask = Ask(name, incarnation, seen, free, served, frozenset(holding))
        self.tickets.meet(ask)
        return self.tickets.lease(ask)

    def report(self, *uids: str, kind: Any = "trained", version: int = 0, trained_at: int = 0, **fields: Any) -> int:
        self.number += 1
        outcomes = [Outcome(uid, kind) for uid in uids]
        return self.tickets.report(
            Outcomes(number=self.number, version=version, trained_at_version=trained_at, outcomes=outcomes, **fields)
        )


def uids(grants: list[Grant]) -> list[str]:
    return [grant.prompt.uid for grant in grants]


def numbers(grants: list[Grant]) -> list[int]:
    return [grant.number for grant in grants]


# --- grants ---


def test_no_number_is_given_twice_whatever_the_dataloader_has_forgotten() -> None:
    book = Book()
    book.lease(A, 2)
    # A reply of a lost dataloader, which came after it had said what it holds.
    assert numbers(book.lease(A, 2, seen=7)) == [8, 9]
    book.tickets.give_back(A, 1, ["0-2", "0-3"])
    previous, book = book.tickets, Book()
    book.tickets.adopt(A, 1, TicketsHeld(seen=7, served_version=0, tickets=[]), previous)
    assert numbers(book.lease(A, 2, seen=7)) == [10, 11]


def test_the_share_counts_what_a_rollouter_really_holds() -> None:
    book = Book(groups=2, staleness_max=1)
    assert book.lease(B, served=-1) == []
    assert uids(book.lease(A, 4)) == ["0-0", "0-1"]
    assert book.lease(A, 4, seen=2, holding=("0-0", "0-1")) == []
    # One of them was delivered: it is outstanding still, but no longer being generated.
    assert uids(book.lease(A, 4, seen=2, holding=("0-1",))) == ["0-2"]


# --- returns and deaths ---


@pytest.mark.parametrize(("name", "incarnation"), [(B, 1), (A, 0), (A, 2), ("rollouter/9", 1)])
def test_nobody_returns_what_another_one_holds(name: str, incarnation: int) -> None:
    book = Book()
    book.lease(A, 2)
    book.lease(B, 1)
    book.tickets.give_back(name, incarnation, ["0-0", "7-7"])
    assert book.tickets.outstanding == 3


def test_a_death_counts_for_what_may_have_been_generated_then() -> None:
    book = Book()
    book.lease(A, 3)
    book.lease(A, 1, seen=3, holding=("0-0", "0-2"))
    book.tickets.died(A, 1)
    # 0-1 was delivered, by its holder's word; 0-2 was too, by the learner's; 0-3 may have arrived.
    book.tickets.settle(book.tickets.orphans, ["0-2"])
    assert [(g.prompt.uid, g.attempt) for g in book.lease(B, 3)] == [("0-0", 1), ("0-1", 0), ("0-3", 1)]
    assert book.tickets.supply.attempts == {"0-0": 1, "0-3": 1}


def test_who_leaves_gives_back_and_of_the_rest_the_learner_is_asked_and_nothing_is_suspect() -> None:
    """I1: what it may have delivered is not generated again before the learner has said so."""
    book = Book()
    book.lease(B, 1)
    book.lease(A, 3)
    book.lease(A, 1, seen=3, holding=("0-1", "0-3"))
    book.tickets.give_back(A, 1, ["0-1"])
    book.tickets.left(A, 1)
    # Its share of the gate is that of the others from here on.
    assert not book.tickets.knows(A)
    assert list(book.tickets.orphans) == ["0-2", "0-3", "0-4"]
    book.tickets.settle(book.tickets.orphans, ["0-2"])
    found = book.lease(B, 7, seen=1, holding=("0-0",))
    assert [(g.prompt.uid, g.attempt) for g in found][:3] == [("0-1", 0), ("0-3", 0), ("0-4", 0)]
    assert book.tickets.supply.attempts == {}
    # Its process ends later.
    book.tickets.died(A, 1)
    assert list(book.tickets.orphans) == []


def test_who_begins_to_leave_keeps_what_it_holds_and_what_it_never_received_is_granted_again() -> None:
    """I1: without waiting for its end, and without a suspicion; what it holds is its own until then."""
    book = Book()
    book.lease(A, 2)
    book.lease(A, 2, seen=2, holding=("0-0", "0-1"))
    for _ in range(2):
        # Said again, it is the same.
        book.tickets.left(A, 1, ["0-0", "0-1"])
        assert list(book.tickets.orphans) == ["0-2", "0-3"]
    book.tickets.settle(book.tickets.orphans, [])
    assert [(g.prompt.uid, g.attempt) for g in book.lease(B, 2)] == [("0-2", 0), ("0-3", 0)]
    book.tickets.died(A, 1)
    assert list(book.tickets.orphans) == ["0-0", "0-1"]


def test_a_new_book_has_no_grants_for_who_leaves_but_those_it_holds() -> None:
    book, other = Book(), Book()
    book.lease(A, 3)
    tickets = TicketsHeld(seen=1, served_version=0, tickets=[HeldTicket("0-0", 1, 0)], leaving=True)
    other.tickets.adopt(A, 1, tickets, book.tickets)
    assert other.tickets.missing(book.tickets) == ["0-1", "0-2"]


# --- outcomes ---


def test_a_repeated_report_and_one_after_a_gap_change_nothing() -> None:
    book = Book()
    book.lease(A, 4)
    first = Outcomes(number=1, version=0, trained_at_version=0, outcomes=[Outcome("0-0", "trained")])
    assert book.tickets.report(first) == 1
    assert book.tickets.report(first) == 1
    third = Outcomes(number=3, version=0, trained_at_version=0, outcomes=[Outcome("0-1", "trained")])
    assert book.tickets.report(third) == 1
    assert book.tickets.counts["trained"] == 1


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (("0-100",), "trained"),
        (("0-0", "0-100"), "trained"),
        (("0-0", "0-0"), "trained"),
        (("x",), "trained"),
        (("0-0",), "evaluated"),
        (("x@0-0",), "trained"),
    ],
)
def test_an_outcome_that_cannot_be_is_refused_as_a_whole(wrong: tuple[str, ...], kind: str) -> None:
    book = Book()
    book.lease(A, 4)
    book.report("0-3", kind="filtered")
    with pytest.raises(ProtocolError, match=wrong[-1]):
        book.report(*wrong, kind=kind)
    assert book.tickets.outstanding == 3
    book.number = 1
    assert book.report("0-0") == 2


def test_an_outcome_of_a_prompt_whose_turn_has_not_come_is_recorded_and_the_prompt_passed_over() -> None:
    book = Book()
    book.report("0-1", kind="filtered")
    book.report("0-2", "1-0")
    assert uids(book.lease(A, 2)) == ["0-0", "0-3"]
    assert book.tickets.outstanding == 2
    assert book.tickets.gate.trained == 2


def test_an_outcome_that_is_known_changes_nothing() -> None:
    book = Book(evals=(EvalSet("a", (0, 1), at_start=True),))
    book.report("0-0", "0-1")
    book.report("0-0")
    book.report("0-1", kind="filtered")
    book.report("a@0-0", kind="evaluated")
    book.report("a@0-0", "a@9-0", kind="evaluated")
    assert book.tickets.gate.trained == 2
    assert book.tickets.supply.evals == {"eval/a@0": 2}


# --- the supply ---


def test_the_number_moves_with_what_the_learner_must_know_and_not_with_every_grant() -> None:
    book = Book(steps=2, staleness_max=5, evals=(EvalSet("a", (0,), every_versions=1),))
    seen = [book.tickets.supply_number]

    def moved() -> bool:
        seen.append(book.tickets.supply_number)
        return seen[-1] > seen[-2]

    book.lease(A, 3)
    assert not moved()
    book.lease(A, 5, seen=3)
    assert moved()
    book.report("0-0")
    assert moved()
    book.report(version=1, trained_at=1)
    assert moved()
    assert book.tickets.supply.evals == {"eval/a@1": 1}
    book.report("a@1-0", kind="evaluated", version=1, trained_at=1)
    assert moved()
    book.report(version=1, trained_at=1, finished=True)
    assert not moved()


# --- evaluation ---


def test_rounds_in_between_take_turns_with_training_and_need_no_place() -> None:
    book = Book(staleness_max=0, evals=(EvalSet("a", (0, 1, 2), every_versions=1),))
    granted = uids(book.lease(A, 4))
    book.report(*granted, version=1, trained_at=4)
    assert uids(book.lease(A, 4, seen=4, served=1)) == ["a@1-0", "0-4", "a@1-1", "0-5"]
    assert uids(book.lease(A, 4, seen=8, served=1)) == ["a@1-2", "0-6", "0-7"]


def test_closed_once_the_run_is_finished_and_no_round_is_open() -> None:
    book = Book(steps=1, evals=(EvalSet("a", (0,), at_end=True),))
    granted = uids(book.lease(A, 4))
    book.report(*granted, version=1, trained_at=4)
    assert not book.tickets.closed
    book.report(version=1, trained_at=4, finished=True)
    assert not book.tickets.closed
    assert book.lease(A, 4, seen=4, served=0) == []
    assert uids(book.lease(A, 4, seen=4, served=1)) == ["a@1-0"]
    assert not book.tickets.closed
    book.report("a@1-0", kind="evaluated", version=1, trained_at=4)
    assert book.tickets.closed
    assert book.lease(B, 4, served=1) == []


def test_a_run_that_ends_early_grants_nothing_more_for_training() -> None:
    book = Book()
    book.lease(A, 2)
    book.tickets.give_back(A, 1, ["0-0"])
    book.report(finished=True)
    assert book.lease(A, 4, seen=2) == []
    assert book.tickets.supply.exhausted
    assert book.tickets.closed


# --- requeues ---


def requeue(book: Book, *uids: str, requeues: int = 1) -> None:
    book.number += 1
    outcomes = [Outcome(uid, "requeued", requeues) for uid in uids]
    report = Outcomes(number=book.number, version=0, trained_at_version=0, outcomes=outcomes)
    for _ in range(2):
        # It is repeated where its acknowledgement was lost.
        assert book.tickets.report(report) == book.number


def test_a_requeued_prompt_is_granted_again_first_of_all_with_its_count() -> None:
    book = Book(staleness_max=0)
    book.lease(free=4)
    number = book.tickets.supply_number
    requeue(book, "0-2")
    # The learner may be waiting for it.
    assert book.tickets.supply_number > number
    assert book.tickets.outstanding == 3
    (grant,) = book.lease(B, free=4)
    assert (grant.prompt.uid, grant.requeues, grant.attempt) == ("0-2", 1, 0)
    requeue(book, "0-2", requeues=2)
    (grant,) = book.lease(B, free=4, seen=1)
    assert (grant.prompt.uid, grant.requeues) == ("0-2", 2)
    book.report("0-2")
    assert (book.ledger.requeues, book.tickets.counts["requeued"]) == ({}, 2)


def test_a_requeued_prompt_is_granted_to_nobody_who_still_holds_an_earlier_attempt() -> None:
    book = Book()
    book.lease(free=2)
    requeue(book, "0-0")
    # Its acknowledgement is on the way: a ticket that it has would be taken for that one.
    assert uids(book.lease(free=2, seen=2, holding=("0-0", "0-1"))) == ["0-2", "0-3"]
    assert uids(book.lease(free=1, seen=4, holding=("0-1", "0-2", "0-3"))) == ["0-0"]


def test_the_last_places_of_a_run_are_kept_for_requeued_prompts() -> None:
    book = Book(groups=2, steps=1)
    book.lease(free=2)
    requeue(book, "0-0")
    assert book.lease(free=1, seen=2, holding=("0-0", "0-1")) == []
    assert not book.tickets.supply.exhausted
    assert uids(book.lease(free=1, seen=2, holding=("0-1",))) == ["0-0"]


def test_nor_after_a_restart_of_the_dataloader() -> None:
    book = Book()
    book.ledger.requeues["0-0"] = 1
    held = TicketsHeld(seen=2, served_version=0, tickets=[HeldTicket("0-0", 1, 0), HeldTicket("0-1", 2, 0)])
    book.tickets.adopt(A, 1, held, None)
    assert book.tickets.outstanding == 1
    assert uids(book.lease(free=1, seen=2, holding=("0-0", "0-1"))) == ["0-2"]
    (grant,) = book.lease(B, free=1)
    assert (grant.prompt.uid, grant.requeues) == ("0-0", 1)


def test_a_prompt_that_is_requeued_and_done_in_one_report_is_done() -> None:
    """Groups that an earlier learner had requeued may have been generated already."""
    book = Book()
    book.lease(free=2)
    book.number += 1
    outcomes = [Outcome("0-0", "requeued", 1), Outcome("0-0", "trained"), Outcome("0-1", "filtered")]
    report = Outcomes(number=book.number, version=0, trained_at_version=0, outcomes=outcomes)
    assert book.tickets.report(report) == book.number
    assert book.tickets.outstanding == 0
    assert uids(book.lease(free=2, seen=2)) == ["0-2", "0-3"]


def test_an_answer_about_an_orphan_is_not_one_about_the_same_prompt_after_its_requeue() -> None:
    book = Book()
    book.lease(free=1)
    book.tickets.died(A, 1)
    asked = book.tickets.orphans
    requeue(book, "0-0")
    assert uids(book.lease(B, free=1)) == ["0-0"]
    book.tickets.died(B, 1)
    book.tickets.settle(asked, ["0-0"])
    assert list(book.tickets.orphans) == ["0-0"]
    book.tickets.settle(book.tickets.orphans, [])
    assert uids(book.lease(free=1, incarnation=2)) == ["0-0"]

"""Prompts that were held in deaths: whom they are granted to, beside whom, and when they are given up."""

from __future__ import annotations

from test_tickets import A, B, Book, uids

from asyncrl.dataloader.evals import EvalSet
from asyncrl.dataloader.holders import Grant
from asyncrl.messages.dataloader import Rejected
from asyncrl.messages.rollouter import HeldTicket, TicketsHeld


def suspicious(book: Book, *indices: int, deaths: int = 2) -> Book:
    """Prompts of epoch 0 that were held in so many deaths."""
    book.ledger.attempts.update({f"0-{index}": deaths for index in indices})
    return book


def dies(book: Book, name: str, incarnation: int, *held_by_learner: str) -> None:
    book.tickets.died(name, incarnation)
    book.tickets.settle(book.tickets.orphans, held_by_learner)


def marks(grants: list[Grant]) -> list[tuple[str, int, bool]]:
    return [(grant.prompt.uid, grant.attempt, grant.alone) for grant in grants]


def test_a_prompt_runs_alone_from_its_second_death_on() -> None:
    book = Book()
    for attempt in (0, 1):
        assert marks(book.lease(A, 2, incarnation=attempt + 1)) == [("0-0", attempt, False), ("0-1", attempt, False)]
        dies(book, A, attempt + 1)
    assert marks(book.lease(A, 4, incarnation=3)) == [("0-0", 2, True)]
    assert book.lease(A, 3, incarnation=3, seen=1, holding=("0-0",)) == []
    # Another one that is empty takes the next.
    assert marks(book.lease(B, 4)) == [("0-1", 2, True)]
    # Delivered: it shares again.
    assert marks(book.lease(A, 2, incarnation=3, seen=1)) == [("0-2", 0, False), ("0-3", 0, False)]


def test_one_rollouter_is_set_aside_and_the_others_go_on() -> None:
    book = suspicious(Book(staleness_max=5), 4, 5)
    assert uids(book.lease(A, 2)) == ["0-0", "0-1"]
    assert uids(book.lease(B, 2)) == ["0-2", "0-3"]
    # B comes to the first of them, and is set aside; A is not.
    assert book.lease(B, 2, seen=2, holding=("0-2", "0-3")) == []
    assert uids(book.lease(A, 1, seen=2, holding=("0-0", "0-1"))) == ["0-6"]
    assert book.lease(B, 2, seen=2, holding=("0-3",)) == []
    assert marks(book.lease(B, 2, seen=2)) == [("0-4", 2, True)]
    # One is left that waits.
    assert book.lease(A, 1, seen=3, holding=("0-0", "0-1", "0-6")) == []
    assert marks(book.lease(A, 4, seen=3)) == [("0-5", 2, True)]
    assert uids(book.lease(B, 1, seen=3)) == ["0-7"]


def test_the_places_of_those_that_wait_are_kept_for_them() -> None:
    book = suspicious(Book(steps=1, groups=4), 1, 2)
    assert uids(book.lease(A, 1)) == ["0-0"]
    assert book.lease(A, 1, seen=1, holding=("0-0",)) == []
    # Two of the four places wait for the suspects, and one is taken.
    assert marks(book.lease(B, 4)) == [("0-1", 2, True)]
    assert not book.tickets.supply.exhausted
    book.lease(B, 1, seen=1, served=-1)
    assert marks(book.lease(B, 4, seen=1)) == [("0-2", 2, True)]
    assert uids(book.lease(A, 4, seen=1, holding=("0-0",))) == ["0-3"]
    assert book.tickets.supply.exhausted


def test_only_deaths_of_its_own_count_against_a_prompt() -> None:
    book = suspicious(Book(), 0)
    # Shared, as it may be with a rollouter that held it before a restore.
    held = TicketsHeld(seen=2, served_version=0, tickets=[HeldTicket("0-0", 1, 2), HeldTicket("0-1", 2, 0)])
    book.tickets.adopt(A, 1, held, None)
    dies(book, A, 1)
    assert book.tickets.supply.attempts == {"0-0": 2, "0-1": 1}
    # Alone, but it never said that it received it.
    book.lease(A, 1, incarnation=2)
    dies(book, A, 2)
    assert book.tickets.supply.attempts["0-0"] == 2
    # Alone, and the learner has it.
    book.lease(A, 1, incarnation=3)
    book.lease(A, 1, incarnation=3, seen=1, holding=("0-0",))
    dies(book, A, 3, "0-0")
    assert book.tickets.supply.attempts["0-0"] == 2


def test_a_prompt_that_kills_on_its_own_is_rejected_with_the_reason() -> None:
    book = suspicious(Book(), 0)
    numbers = []
    for incarnation, deaths in enumerate((2, 3, 4), 1):
        assert marks(book.lease(A, 1, incarnation=incarnation)) == [("0-0", deaths, True)]
        book.lease(A, 1, incarnation=incarnation, seen=1, holding=("0-0",))
        numbers.append(book.tickets.supply_number)
        dies(book, A, incarnation)
    assert numbers == sorted(set(numbers))
    assert book.tickets.supply_number > numbers[-1]
    assert book.tickets.outstanding == 0
    reason = "killed its rollouter 3 times while it ran alone (rollout.max_attempts)"
    assert book.tickets.supply.rejected == [Rejected("0-0", reason)]
    assert uids(book.lease(A, 1, incarnation=4)) == ["0-1"]
    book.report("0-0", kind="quarantined")
    assert (book.tickets.supply.rejected, book.tickets.supply.attempts) == ([], {})


def test_eval_prompts_run_alone_and_are_rejected_likewise() -> None:
    book = Book(evals=(EvalSet("a", (0, 1), at_start=True),))
    for incarnation in range(1, 6):
        alone = incarnation > 2
        assert marks(book.lease(A, 1, incarnation=incarnation)) == [("a@0-0", incarnation - 1, alone)]
        book.lease(A, 1, incarnation=incarnation, seen=1, served=-1, holding=("a@0-0",))
        dies(book, A, incarnation)
    assert [rejected.uid for rejected in book.tickets.supply.rejected] == ["a@0-0"]
    assert uids(book.lease(A, 2, incarnation=6)) == ["a@0-1"]
    book.report("a@0-1", kind="evaluated")
    assert book.lease(A, 2, incarnation=6, seen=1) == []
    book.report("a@0-0", kind="quarantined")
    assert book.tickets.supply.evals == {}
    assert uids(book.lease(A, 1, incarnation=6, seen=1)) == ["0-0"]


def test_what_a_rollouter_found_on_disk_takes_no_number_of_its_grants() -> None:
    book = Book()
    book.lease(A, 2)
    previous, book = book.tickets, Book()
    held = TicketsHeld(seen=0, served_version=0, tickets=[HeldTicket("0-5", 1, 0), HeldTicket("0-6", 9, 0)])
    book.tickets.adopt(A, 1, held, previous)
    assert book.tickets.outstanding == 4
    assert [(grant.number, grant.prompt.uid) for grant in book.lease(A, 3, holding=("0-5", "0-6"))] == [
        (1, "0-0"),
        (2, "0-1"),
        (3, "0-2"),
    ]

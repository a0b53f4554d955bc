"""The book of leases, event by event. test_lease_book_model and test_exactly_once_model have arbitrary orders."""

from __future__ import annotations

from typing import Any

import pytest
from dataloader.eval_sets import eval_set
from run_settings import simulated_run

from asyncrl.core.errors import ProtocolError
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate, WorkingLimit
from asyncrl.dataloader.lease_book import Ask, LeaseBook, PromptLease
from asyncrl.dataloader.prompt_queue import PromptQueue, PromptSource
from asyncrl.dataloader.restoring import Restorer, RollouterAnswer, adopt, inherit, missing
from asyncrl.messages.dataloader import LeasesHeld, Outcome, Outcomes, Rejected, Restored
from asyncrl.messages.ledger import Ledger

A, B = "rollouter/0", "rollouter/1"


class Book(LeaseBook):
    """A book of leases over a hundred prompts in order, and the number of its learner's last report."""

    def __init__(
        self,
        *evals: EvalSet,
        staleness_max: int = 1,
        groups: int = 4,
        steps: int = 100,
        deaths: dict[str, int] | None = None,
    ) -> None:
        limit = WorkingLimit(
            groups_per_step=groups, groups_per_version=groups, staleness_max=staleness_max, adapt=False
        )
        gate = Gate(limit, groups_per_version=groups, groups_left=steps * groups)
        ledger = Ledger()
        ledger.attempts = dict(deaths or {})
        queue = PromptQueue([PromptSource(EpochOrder("f", 0, 100, shuffle=False))], ledger)
        super().__init__(queue, gate, EvalRounds(evals), max_attempts=3)

    def lease(self, name: str = A, free: int = 4, *, seen: int = 0, served: int = 0, life: int = 1, **of: Any) -> Any:
        holding, number = frozenset(of.get("holding", "").split()), of.get("number", 0)
        ask = Ask(name, life, seen, free, served, holding, number)
        self.meet(ask)
        return self.take(ask)

    def uids(self, *of: Any, **more: Any) -> list[str]:
        return [lease.prompt.uid for lease in self.lease(*of, **more)]

    def record(self, *uids: str, kind: Any = "trained", version: int = 0, **fields: Any) -> int:
        outcomes = [Outcome(uid, kind) for uid in uids]
        fields = {"number": self.number + 1, "trained_at_version": 4 * version, **fields}
        return self.report(Outcomes(version=version, outcomes=outcomes, **fields))

    def dies(self, name: str, life: int, *held_by_learner: str) -> None:
        self.died(name, life)
        self.settle(self.orphans, held_by_learner)


def marks(leases: list[PromptLease]) -> list[tuple[str, int, bool]]:
    return [(lease.prompt.uid, lease.attempt, lease.alone) for lease in leases]


def held(attempts: dict[str, int] | None = None, *, seen: int = 0, leaving: bool = False) -> LeasesHeld:
    return LeasesHeld(seen=seen, served_version=0, attempts=attempts or {}, leaving=leaving)


# --- leases ---


def test_no_lease_number_is_used_twice_after_a_restart_of_the_dataloader() -> None:
    book = Book()
    book.lease(A, 2)
    # A reply of a lost dataloader, which came after it had said what it holds.
    assert [lease.number for lease in book.lease(A, 2, seen=7)] == [8, 9]
    book.give_back(A, 1, ["0-2", "0-3"])
    after = Book()
    adopt(after, A, RollouterAnswer(1, held(seen=7)), book)
    assert [lease.number for lease in after.lease(A, 2, seen=7)] == [10, 11]
    # Found on its disk: they take no number of its leases.
    after = Book()
    adopt(after, B, RollouterAnswer(1, held({"0-5": 0, "0-6": 0})), book)
    assert [lease.number for lease in after.lease(B, 2, holding="0-5 0-6")] == [1, 2]


def test_the_share_counts_what_a_rollouter_really_holds() -> None:
    book = Book(groups=2)
    assert book.lease(B, served=-1) == []
    assert book.uids() == ["0-0", "0-1"]
    assert book.lease(seen=2, holding="0-0 0-1") == []
    # One of them was delivered: it is outstanding still, but no longer being generated.
    assert book.uids(seen=2, holding="0-1") == ["0-2"]


# --- numbers of requests ---


def request(book: LeaseBook, number: int, *, free: int = 1, seen: int = 0, life: int = 1, holding: str = "") -> Any:
    """Uids and lease numbers of the answer to a request of A."""
    ask = Ask(A, life, seen, free, 0, frozenset(holding.split()), number)
    book.meet(ask)
    return [(lease.prompt.uid, lease.number) for lease in book.take(ask)]


def restored_without_answer(book: Book, *claims: str) -> LeaseBook:
    """The book after a restore that reached no rollouter, with a learner that has these groups."""
    word = Restored(
        version=0,
        trained_at_version=0,
        groups_left=400,
        outcomes_number=book.number,
        ledger=Ledger().state,
        claims=list(claims),
    )
    config = simulated_run(learner={"groups_per_step": 4}, staleness={"max": 1, "adapt": False})
    restorer = Restorer(config, [PromptSource(EpochOrder("f", 0, 100, shuffle=False))])
    return restorer.rebuild(word, {}, book, book.status_number + 1)


def test_a_superseded_request_gets_no_lease_and_the_later_one_stays_answered() -> None:
    book = Book()
    assert book.lease(A, 1, served=-1, number=1) == []
    assert request(book, 2) == [("0-0", 1)]
    # A late copy of the first request. The rollouter ignores its answer.
    assert request(book, 1) == []
    # The rollouter has lease 1. If a copy got another prompt as lease 1, the prompt would be lost.
    after = restored_without_answer(book, "0-0")
    assert [request(after, number) for number in (1, 2)] == [[], []]
    # The next incarnation counts from 1 again.
    assert request(after, 1, life=2) == [("0-1", 1)]


def test_a_repeated_request_gets_the_same_leases_and_no_new_ones() -> None:
    book = Book()
    assert request(book, 1) == [("0-0", 1)]
    assert request(book, 1, free=2) == [("0-0", 1)]
    # The rollouter may hold the prompt that it returns until the return is acknowledged.
    book.give_back(A, 1, ["0-0"])
    assert request(book, 1, free=2) == []
    # The answer was lost. Only the next request gets new leases.
    assert request(book, 2, free=2) == [("0-0", 2), ("0-1", 3)]


def test_a_request_answered_before_a_restore_gets_no_new_leases_after_it() -> None:
    """I1: the rollouter did not answer the restore, so its lease numbers are not known."""
    book = Book()
    assert request(book, 1) == [("0-0", 1)]
    # The learner has the group, and the rollouter still holds it.
    after = restored_without_answer(book, "0-0")
    assert request(after, 1) == []
    # The rollouter would ignore a prompt with number 1, because it has seen that number.
    assert request(after, 2, seen=1, holding="0-0") == [("0-1", 2)]
    assert after.outstanding == 2


# --- returns and deaths ---


def test_a_leaving_rollouter_returns_prompts_and_the_learner_decides_about_the_rest() -> None:
    """I1: what it may have delivered is not generated again before the learner has said so."""
    book = Book()
    book.lease(B, 1)
    book.lease(A, 3)
    book.lease(A, 1, seen=3, holding="0-1 0-3")
    for _ in range(2):
        # It begins to leave: what it never received is leased again without waiting for its end.
        book.left(A, 1, ["0-1", "0-3"])
        assert list(book.orphans) == ["0-2", "0-4"]
    # A rollouter cannot return what another holds, nor an incarnation the prompts of another.
    for name, life in ((B, 1), (A, 0), (A, 2), ("rollouter/9", 1)):
        book.give_back(name, life, ["0-1", "7-7"])
    assert book.outstanding == 5
    book.give_back(A, 1, ["0-1"])
    book.left(A, 1)
    # Its share of the gate is that of the others from here on.
    assert A not in book.rollouters
    assert list(book.orphans) == ["0-2", "0-4", "0-3"]
    book.settle(book.orphans, ["0-2"])
    assert marks(book.lease(B, 7, seen=1, holding="0-0"))[:3] == [(uid, 0, False) for uid in ("0-1", "0-3", "0-4")]
    assert book.status.attempts == {}
    # Its process ends later.
    book.died(A, 1)
    assert not book.orphans
    # A new book has no leases for who leaves but those it holds.
    book, after = Book(), Book()
    book.lease(A, 3)
    adopt(after, A, RollouterAnswer(1, held({"0-0": 0}, seen=1, leaving=True)), book)
    assert missing(after, book) == ["0-1", "0-2"]


def test_a_leaving_rollouter_that_holds_something_takes_no_share_of_the_gate() -> None:
    book = Book()
    assert book.uids(A, 1) == ["0-0"]
    book.lease(B, served=-1)
    book.left(A, 1, ["0-0"])
    after = Book()
    adopt(after, A, RollouterAnswer(1, held({"0-0": 0}, seen=1, leaving=True)), book)
    for each in (book, after):
        # As many as the gate has room for.
        assert each.uids(B, 9) == [f"0-{index}" for index in range(1, 8)]
        # A late call of it gets no lease, although there is room.
        each.give_back(B, 1, [f"0-{index}" for index in range(2, 8)])
        assert each.uids(A, 1, seen=1) == []
        # Its successor has a share again.
        each.lease(A, served=-1, life=2)
        assert each.uids(B, 9, seen=7, holding="0-1") == ["0-2", "0-3", "0-4"]


# --- outcomes ---


def test_a_repeated_report_and_one_after_a_gap_change_nothing() -> None:
    book = Book()
    book.lease()
    assert [book.record("0-0", number=1) for _ in range(2)] == [1, 1]
    assert book.record("0-1", number=3) == 1
    assert book.counts["trained"] == 1


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (("0-0", "0-100"), "trained"),
        (("0-0", "0-0"), "trained"),
        (("x",), "trained"),
        (("0-0",), "evaluated"),
        (("x@0-0",), "trained"),
    ],
)
def test_a_report_with_an_impossible_outcome_is_refused_as_a_whole(wrong: tuple[str, ...], kind: str) -> None:
    book = Book()
    book.lease()
    with pytest.raises(ProtocolError, match=wrong[-1]):
        book.record(*wrong, kind=kind)
    assert book.outstanding == 4
    assert book.record("0-0") == 1


def test_an_outcome_counts_once_also_before_its_prompts_turn() -> None:
    book = Book(eval_set("a", (0, 1), every_versions=1))
    book.record("0-1", kind="filtered", version=1)
    book.record("0-2", "1-0")
    book.record("0-2", kind="filtered")
    for _ in range(2):
        book.record("a@1-0", "a@9-0", kind="evaluated")
    assert book.uids(A, 2) == ["0-0", "0-3"]
    assert (book.outstanding, book.gate.trained, book.status.evals) == (2, 2, {"eval/a@1": 2})


def test_the_supply_number_changes_only_with_news_for_the_learner() -> None:
    book = Book(eval_set("a", (0,), every_versions=1), steps=2, staleness_max=5)
    seen = [book.status_number]

    def moved() -> bool:
        seen.append(book.status_number)
        return seen[-1] > seen[-2]

    book.lease(A, 3)
    assert not moved()
    book.lease(A, 5, seen=3)
    assert moved() and book.status.exhausted
    book.record("0-0")
    assert moved()
    book.record(version=1)
    assert moved()
    book.record("a@1-0", kind="evaluated", version=1)
    assert moved()
    book.record(version=1, finished=True)
    assert not moved()


# --- evaluation, the end ---


def test_intermediate_rounds_alternate_with_training_and_need_no_place() -> None:
    book = Book(eval_set("a", (0, 1, 2), every_versions=1), staleness_max=0)
    book.record(*book.uids(), version=1)
    assert book.uids(seen=4, served=1) == ["a@1-0", "0-4", "a@1-1", "0-5"]
    assert book.uids(seen=8, served=1) == ["a@1-2", "0-6", "0-7"]


def test_the_book_closes_once_the_run_is_finished_and_no_round_is_open() -> None:
    book = Book(eval_set("a", (0,), at_end=True), steps=1)
    book.record(*book.uids(), version=1)
    assert not book.closed
    book.record(version=1, finished=True)
    assert not book.closed and book.status.exhausted
    assert book.lease(seen=4) == []
    assert book.uids(seen=4, served=1) == ["a@1-0"]
    assert not book.closed
    book.record("a@1-0", kind="evaluated", version=1)
    assert book.closed
    assert book.lease(B, served=1) == []


# --- prompts that were held in deaths ---


def test_a_prompt_runs_alone_after_its_second_death() -> None:
    book = Book()
    for attempt in (0, 1):
        assert marks(book.lease(A, 2, life=attempt + 1)) == [("0-0", attempt, False), ("0-1", attempt, False)]
        book.dies(A, attempt + 1)
    assert marks(book.lease(life=3)) == [("0-0", 2, True)]
    assert book.lease(A, 3, life=3, seen=1, holding="0-0") == []
    # Another one that is empty takes the next.
    assert marks(book.lease(B)) == [("0-1", 2, True)]
    # Delivered: it shares again.
    assert marks(book.lease(A, 2, life=3, seen=1)) == [("0-2", 0, False), ("0-3", 0, False)]


def test_one_rollouter_is_set_aside_and_the_others_continue() -> None:
    book = Book(staleness_max=5, deaths={"0-4": 2, "0-5": 2})
    assert book.uids(A, 2) == ["0-0", "0-1"]
    assert book.uids(B, 2) == ["0-2", "0-3"]
    # B comes to the first of them, and is set aside; A is not. Places of the run are kept for both.
    assert book.lease(B, 2, seen=2, holding="0-2 0-3") == []
    assert book.uids(A, 1, seen=2, holding="0-0 0-1") == ["0-6"]
    assert book.lease(B, 2, seen=2, holding="0-3") == []
    assert marks(book.lease(B, 2, seen=2)) == [("0-4", 2, True)]
    # One is left that waits.
    assert book.lease(A, 1, seen=3, holding="0-0 0-1 0-6") == []
    assert marks(book.lease(A, seen=3)) == [("0-5", 2, True)]
    assert book.uids(B, 1, seen=3) == ["0-7"]


def test_only_its_own_deaths_count_against_a_prompt() -> None:
    book = Book()
    book.lease(A, 3)
    book.lease(A, 1, seen=3, holding="0-0 0-2")
    # 0-1 was delivered, by its holder's word; 0-2 was too, by the learner's; 0-3 may have arrived.
    book.dies(A, 1, "0-2")
    assert book.status.attempts == {"0-0": 1, "0-3": 1}
    # Shared, as it may be with a rollouter that held it before a restore.
    book = Book(deaths={"0-0": 2})
    adopt(book, A, RollouterAnswer(1, held({"0-0": 2, "0-1": 0}, seen=2)), None)
    book.dies(A, 1)
    assert book.status.attempts == {"0-0": 2, "0-1": 1}
    # Alone, but it never said that it received it.
    book.lease(A, 1, life=2)
    book.dies(A, 2)
    # Alone, and the learner has it.
    book.lease(A, 1, life=3)
    book.lease(A, 1, life=3, seen=1, holding="0-0")
    book.dies(A, 3, "0-0")
    assert book.status.attempts["0-0"] == 2


def test_a_prompt_delivered_before_the_death_is_not_blamed_for_it() -> None:
    book = Book(deaths={"0-0": 2})
    book.lease(A, 1)
    book.lease(A, 1, seen=1, holding="0-0")
    book.dies(A, 1, "0-0")
    # A learner at an earlier checkpoint knows nothing of it, nor does anybody else.
    after = Book(deaths={"0-0": 2})
    inherit(after, book)
    assert after.ledger.attempts == {"0-0": 2}


def test_a_prompt_that_kills_alone_is_rejected_with_the_reason() -> None:
    book = Book(deaths={"0-0": 2})
    numbers = []
    for life, deaths in enumerate((2, 3, 4), 1):
        assert marks(book.lease(A, 1, life=life)) == [("0-0", deaths, True)]
        book.lease(A, 1, life=life, seen=1, holding="0-0")
        numbers.append(book.status_number)
        book.dies(A, life)
    assert [*numbers, book.status_number] == sorted({*numbers, book.status_number})
    reason = "its engine or rollouter died 3 times while this prompt alone was generated (rollout.max_attempts)"
    assert (book.outstanding, book.status.rejected) == (0, [Rejected("0-0", reason)])
    assert book.uids(A, 1, life=4) == ["0-1"]
    book.record("0-0", kind="quarantined")
    assert (book.status.rejected, book.status.attempts) == ([], {})


def test_eval_prompts_also_run_alone_and_are_rejected() -> None:
    book = Book(eval_set("a", (0, 1), at_start=True))
    for life in range(1, 6):
        assert marks(book.lease(A, 1, life=life)) == [("a@0-0", life - 1, life > 2)]
        book.lease(A, 1, life=life, seen=1, served=-1, holding="a@0-0")
        book.dies(A, life)
    assert [rejected.uid for rejected in book.status.rejected] == ["a@0-0"]
    assert book.uids(A, 2, life=6) == ["a@0-1"]
    book.record("a@0-1", kind="evaluated")
    assert book.lease(A, 2, life=6, seen=1) == []
    book.record("a@0-0", kind="quarantined")
    assert book.status.evals == {}
    assert book.uids(A, 1, life=6, seen=1) == ["0-0"]

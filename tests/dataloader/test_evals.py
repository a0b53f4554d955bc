"""Evaluation rounds: when each opens and closes, and which holder its prompts have."""

from __future__ import annotations

from dataloader.eval_sets import eval_set

from asyncrl.dataloader.evals import EvalRounds
from asyncrl.messages.dataloader import Rejected


def take_all(rounds: EvalRounds, served: int) -> list[str]:
    found = []
    while (prompt := rounds.take(served)) is not None:
        found.append(prompt.uid)
    return found


def test_a_round_at_the_start_is_open_until_its_last_prompt_is_evaluated() -> None:
    rounds = EvalRounds([eval_set("a", (0, 2), at_start=True), eval_set("b", (0,), every_versions=1)])
    assert rounds.starting
    assert rounds.sizes == {"eval/a@0": 2}
    assert rounds.take(-1) is None
    # One that is evaluated while it waits is not leased.
    rounds.finish_prompt("a@0-0")
    assert "a@0-0" not in rounds and rounds.starting
    assert take_all(rounds, 0) == ["a@0-2"]
    rounds.finish_prompt("a@0-2")
    assert (rounds.starting, rounds.sizes) == (False, {})


def test_a_round_opens_at_each_multiple_unless_the_last_one_is_open() -> None:
    rounds = EvalRounds([eval_set("a", (0,), every_versions=3), eval_set("b", (0,), every_versions=1)])
    rounds.published(2, 0)
    assert rounds.sizes == {"eval/b@2": 1}
    rounds.finish_prompt("b@2-0")
    rounds.published(4, 2)
    rounds.published(6, 4)
    assert rounds.sizes == {"eval/a@4": 1, "eval/b@4": 1}
    for uid in ("a@4-0", "b@4-0"):
        rounds.finish_prompt(uid)
    rounds.published(8, 6)
    assert rounds.sizes == {"eval/b@8": 1}
    rounds.published(9, 8)
    assert rounds.sizes == {"eval/b@8": 1, "eval/a@9": 1}


def test_the_final_round_is_never_skipped_and_may_be_a_round_of_the_last_version() -> None:
    for last, evaluated, sizes in (
        (5, False, {"eval/a@4": 1, "eval/a@5": 1}),
        (4, False, {"eval/a@4": 1}),
        (4, True, {}),
    ):
        rounds = EvalRounds([eval_set("a", (0,), every_versions=2, at_end=True)])
        rounds.published(4, 3)
        if evaluated:
            rounds.finish_prompt("a@4-0")
        rounds.finish(last)
        assert rounds.sizes == sizes


def test_rounds_continue_from_the_state_of_the_learner() -> None:
    """An actor that has started again knows the rounds from the learner."""
    sets = [eval_set("a", (0, 1, 2), every_versions=4, at_start=True)]
    rounds = EvalRounds(sets, 9, closed=["a@0"], open={"a@4": ["a@4-1"], "gone@4": []}, overdue=True)
    assert (rounds.sizes, rounds.starting) == ({"eval/a@4": 3}, False)
    assert [rounds.hold(uid) is not None for uid in ("a@4-0", "a@4-0", "a@4-1", "a@0-0")] == [True, False, False, False]
    assert take_all(rounds, 9) == ["a@4-2"]
    for index in range(3):
        rounds.finish_prompt(f"a@4-{index}")
    assert rounds.sizes == {}
    # An open round at the start still comes before training.
    assert EvalRounds([eval_set("a", (0,), at_start=True)], 9, open={"a@7": []}).starting


def test_a_closed_round_never_opens_again_and_an_unknown_set_starts_at_the_beginning() -> None:
    sets = [eval_set("a", (0,), every_versions=1, at_start=True, at_end=True)]
    rounds = EvalRounds(sets, 3, closed=["a@0", "a@3"], open={"a@3": []}, overdue=True)
    rounds.finish(3)
    assert rounds.sizes == {}
    rounds.finish(4)
    assert rounds.sizes == {"eval/a@4": 1}
    rounds = EvalRounds([eval_set("a", (0,), at_start=True), eval_set("b", (0,), every_versions=4)], 9, overdue=True)
    assert (rounds.sizes, rounds.starting) == ({"eval/a@9": 1, "eval/b@9": 1}, True)
    assert EvalRounds([eval_set("b", (0,), every_versions=4)], 9).sizes == {}


def test_a_rejected_prompt_keeps_its_round_open_until_the_learner_acknowledges_it() -> None:
    rounds = EvalRounds([eval_set("a", (0, 1), at_start=True)])
    first, second = rounds.take(0), rounds.take(0)
    assert first is not None and second is not None
    rounds.reject(first, "it kills")
    rounds.finish_prompt("a@0-1")
    assert (rounds.sizes, rounds.rejected) == ({"eval/a@0": 2}, {"a@0-0": Rejected("a@0-0", "it kills")})
    rounds.finish_prompt("a@0-0")
    assert (rounds.sizes, rounds.rejected) == ({}, {})

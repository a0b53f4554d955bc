"""Evaluation rounds."""

from __future__ import annotations

from asyncrl.dataloader.evals import EvalRounds, EvalSet


def take_all(rounds: EvalRounds, served: int) -> list[str]:
    found = []
    while rounds.is_waiting(served):
        found.append(rounds.take(served).uid)
    return found


def finish_all(rounds: EvalRounds, uids: list[str]) -> None:
    for uid in uids:
        rounds.finish_prompt(uid)


def test_a_round_at_the_start_is_open_until_its_last_prompt_is_evaluated() -> None:
    rounds = EvalRounds([EvalSet("a", (0, 2), at_start=True), EvalSet("b", (0,), every_versions=1)])
    assert rounds.starting
    assert rounds.sizes == {"eval/a@0": 2}
    assert not rounds.is_waiting(-1)
    assert take_all(rounds, 0) == ["a@0-0", "a@0-2"]
    rounds.finish_prompt("a@0-0")
    assert rounds.starting
    rounds.finish_prompt("a@0-2")
    assert not rounds.starting
    assert rounds.sizes == {}


def test_opens_a_round_at_each_multiple_and_names_it_by_the_version() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=3)])
    opened = []
    for version in range(1, 8):
        rounds.published(version, version - 1)
        opened += list(rounds.sizes)
        finish_all(rounds, take_all(rounds, version))
    assert opened == ["eval/a@3", "eval/a@6"]
    assert not rounds.skipped


def test_a_multiple_between_two_reports_is_not_missed() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=3)])
    rounds.published(2, 0)
    assert rounds.sizes == {}
    rounds.published(4, 2)
    assert rounds.sizes == {"eval/a@4": 1}


def test_a_round_is_skipped_and_counted_while_the_last_one_is_open() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=1), EvalSet("b", (0,), every_versions=1)])
    rounds.published(1, 0)
    rounds.finish_prompt("b@1-0")
    rounds.published(2, 1)
    assert rounds.sizes == {"eval/a@1": 1, "eval/b@2": 1}
    assert rounds.skipped == {"a": 1}


def test_the_round_at_the_end_is_never_skipped() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=2, at_end=True)])
    rounds.published(4, 3)
    rounds.finish(5)
    assert rounds.sizes == {"eval/a@4": 1, "eval/a@5": 1}


def test_a_round_in_between_of_the_last_version_serves_as_the_one_at_the_end() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=2, at_end=True)])
    rounds.published(4, 3)
    rounds.finish(4)
    assert rounds.sizes == {"eval/a@4": 1}
    rounds = EvalRounds([EvalSet("a", (0,), every_versions=2, at_end=True)])
    rounds.published(4, 3)
    rounds.finish_prompt("a@4-0")
    rounds.finish(4)
    assert rounds.sizes == {}


def test_a_prompt_that_is_evaluated_while_it_waits_is_not_granted() -> None:
    rounds = EvalRounds([EvalSet("a", (0, 1), at_start=True)])
    rounds.finish_prompt("a@0-0")
    assert "a@0-0" not in rounds
    assert take_all(rounds, 0) == ["a@0-1"]


def test_rounds_that_are_open_go_on_with_what_the_learner_has() -> None:
    """An actor that has started again knows the rounds from the learner."""
    sets = [EvalSet("a", (0, 1, 2), every_versions=4, at_start=True)]
    rounds = EvalRounds(sets, 9, closed=["a@0"], open={"a@4": ["a@4-1"], "gone@4": []}, overdue=True)
    assert rounds.sizes == {"eval/a@4": 3}
    assert not rounds.starting
    held = rounds.hold("a@4-0")
    assert held is not None
    assert rounds.hold("a@4-0") is rounds.hold("a@4-1") is rounds.hold("a@0-0") is None
    assert take_all(rounds, 9) == ["a@4-2"]
    finish_all(rounds, ["a@4-0", "a@4-1", "a@4-2"])
    assert rounds.sizes == {}


def test_a_round_that_is_closed_never_opens_again() -> None:
    sets = [EvalSet("a", (0,), every_versions=1, at_start=True, at_end=True)]
    rounds = EvalRounds(sets, 3, closed=["a@0", "a@3"], open={"a@3": []}, overdue=True)
    assert rounds.sizes == {}
    rounds.finish(3)
    assert rounds.sizes == {}
    rounds.finish(4)
    assert rounds.sizes == {"eval/a@4": 1}


def test_a_set_of_which_nothing_is_known_begins_with_its_round_at_the_start() -> None:
    rounds = EvalRounds([EvalSet("a", (0,), at_start=True), EvalSet("b", (0,), every_versions=4)], 9, overdue=True)
    assert rounds.sizes == {"eval/a@9": 1, "eval/b@9": 1}
    assert rounds.starting
    assert EvalRounds([EvalSet("b", (0,), every_versions=4)], 9).sizes == {}


def test_a_round_at_the_start_that_goes_on_still_comes_before_training() -> None:
    assert EvalRounds([EvalSet("a", (0,), at_start=True)], 9, open={"a@7": []}).starting


def test_a_rejected_prompt_keeps_its_round_open_until_the_learner_has_taken_note() -> None:
    rounds = EvalRounds([EvalSet("a", (0, 1), at_start=True)])
    rounds.reject(rounds.take(0), "it kills")
    rounds.take(0)
    rounds.finish_prompt("a@0-1")
    assert (rounds.sizes, rounds.rejected) == ({"eval/a@0": 2}, {"a@0-0": "it kills"})
    rounds.finish_prompt("a@0-0")
    assert (rounds.sizes, rounds.rejected) == ({}, {})

"""The gate, by tables. What it guarantees over whole runs is in test_tickets_model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.limit import WorkingLimit


def make_gate(*, staleness_max: int = 1, groups: int = 4, run: int = 1000, adapt: bool = False, **rest: int) -> Gate:
    limit = WorkingLimit(groups_per_step=groups, groups_per_version=groups, staleness_max=staleness_max, adapt=adapt)
    return Gate(limit, groups_per_version=groups, groups_left=run, **rest)


def admitted(gate: Gate, served_version: int, outstanding: int = 0) -> int:
    """How many more are admitted in a row."""
    count = 0
    while gate.admits(served_version, outstanding=outstanding + count, generating=0, rollouters=1):
        count += 1
    return count


def test_counts_what_was_trained_and_not_version_times_groups() -> None:
    # A short step, or a version restored from a checkpoint, breaks v * G.
    gate = make_gate(run=993, first_version=5, trained=7)
    assert admitted(gate, 5) == 8
    gate.trained = 9
    gate.published(6, 9)
    assert admitted(gate, 5) == 6
    assert admitted(gate, 6) == 8


def test_what_was_trained_since_the_newest_version_takes_places_of_its_successor() -> None:
    # A dataloader that has started again in the middle of a version.
    gate = make_gate(first_version=5, trained=22, trained_at_version=20)
    assert admitted(gate, 5) == 6
    assert gate.needed(0) == 1000


def test_nothing_is_admitted_before_a_version_of_the_present_learner_is_served() -> None:
    gate = make_gate(first_version=5, trained=7)
    assert [admitted(gate, served) for served in (-1, 0, 4)] == [0, 0, 0]


def test_a_version_that_was_not_reported_yet_counts_as_the_one_before_it() -> None:
    gate = make_gate()
    gate.trained = 8
    gate.published(2, 8)
    assert gate.room(1, 0) == gate.room(0, 0) == 0
    assert gate.room(9, 0) == gate.room(2, 0) == 8


def test_a_laggard_is_counted_rightly_after_older_versions_are_forgotten() -> None:
    gate = make_gate(staleness_max=3)
    for version in (1, 2, 3):
        gate.trained = 4 * version
        gate.published(version, 4 * version)
    before = [gate.room(served, 0) for served in (2, 3)]
    gate.forget_below(2)
    assert [gate.room(served, 0) for served in (2, 3)] == before
    assert gate.room(1, 0) == 0
    gate.forget_below(-1)
    assert gate.room(2, 0) == before[0]


def test_older_publications_change_nothing() -> None:
    gate = make_gate()
    gate.published(3, 12)
    gate.published(3, 99)
    gate.published(1, 99)
    assert gate.room(3, 0) == 20
    assert gate.newest_version == 3


def test_never_more_than_the_run_still_needs() -> None:
    gate = make_gate(run=10)
    assert admitted(gate, 0) == 8
    gate.trained = 8
    gate.published(2, 8)
    assert admitted(gate, 2) == 2
    assert gate.needed(1) == 1
    gate.finished = True
    assert gate.needed(0) == admitted(gate, 2) == 0


@pytest.mark.parametrize(("rollouters", "share"), [(1, 8), (2, 4), (3, 3), (8, 1), (64, 1)])
def test_no_rollouter_generates_more_than_its_share_of_the_places(rollouters: int, share: int) -> None:
    gate = make_gate()
    assert gate.admits(0, outstanding=0, generating=share - 1, rollouters=rollouters)
    assert not gate.admits(0, outstanding=0, generating=share, rollouters=rollouters)


def test_only_a_refusal_by_the_limit_lets_it_grow() -> None:
    def grows(served: int, **asked: int) -> bool:
        gate = make_gate(staleness_max=4, run=20, adapt=True)
        gate.admits(served, **asked, rollouters=1)
        gate.limit.step_began(0, waited=True)
        return gate.limit.versions > 1

    assert grows(0, outstanding=8, generating=0)
    assert grows(0, outstanding=0, generating=8)
    assert not grows(0, outstanding=7, generating=0)
    assert not grows(0, outstanding=20, generating=0)
    assert not grows(-1, outstanding=8, generating=0)


@given(
    staleness_max=st.integers(0, 5),
    groups=st.integers(1, 8),
    served=st.integers(0, 9),
    trained=st.integers(0, 80),
    outstanding=st.integers(0, 80),
)
def test_what_is_admitted_stays_within_the_bound(
    staleness_max: int, groups: int, served: int, trained: int, outstanding: int
) -> None:
    gate = make_gate(staleness_max=staleness_max, groups=groups)
    for version in range(1, 10):
        gate.published(version, version * groups)
    gate.trained = trained
    more = admitted(gate, served, outstanding)
    bound = served * groups + (staleness_max + 1) * groups
    assert trained + outstanding + more <= max(bound, trained + outstanding)
    assert more == max(0, min(bound, 1000) - trained - outstanding)

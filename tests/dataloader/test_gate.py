"""I2, bounded staleness: the gate and its working limit, by tables.

Their guarantees over whole runs are in test_lease_book_model.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.dataloader.gate import PATIENCE, Gate, WorkingLimit


def make_limit(*, staleness_max: int = 4, step: int = 8, version: int = 8, adapt: bool = True) -> WorkingLimit:
    return WorkingLimit(groups_per_step=step, groups_per_version=version, staleness_max=staleness_max, adapt=adapt)


def make_gate(*, staleness_max: int = 1, groups: int = 4, run: int = 1000, adapt: bool = False, **rest: int) -> Gate:
    limit = make_limit(staleness_max=staleness_max, step=groups, version=groups, adapt=adapt)
    return Gate(limit, groups_per_version=groups, groups_left=run, **rest)


def publish(gate: Gate, version: int, trained: int) -> None:
    gate.trained = trained
    gate.published(version, trained)


def admitted(gate: Gate, served_version: int, outstanding: int = 0) -> int:
    """How many more are admitted in a row."""
    count = 0
    while gate.admits(served_version, outstanding=outstanding + count, generating=0, rollouters=1):
        count += 1
    return count


def test_the_gate_counts_trained_groups_and_not_version_times_groups() -> None:
    # A short step, or a version restored from a checkpoint, breaks v * G.
    gate = make_gate(run=993, first_version=5, trained=7)
    assert [admitted(gate, served) for served in (-1, 4, 5)] == [0, 0, 8]
    publish(gate, 6, 9)
    assert [admitted(gate, served) for served in (5, 6)] == [6, 8]
    # A dataloader that has started again in the middle of a version.
    gate = make_gate(first_version=5, trained=22, trained_at_version=20)
    assert (admitted(gate, 5), gate.needed(0)) == (6, 1000)


def test_an_unreported_version_counts_as_the_one_before_it_and_an_older_one_is_ignored() -> None:
    gate = make_gate()
    publish(gate, 2, 8)
    gate.published(2, 99)
    gate.published(1, 99)
    assert [gate.room(served, 0) for served in (0, 1, 2, 9)] == [0, 0, 8, 8]
    assert gate.newest_version == 2


def test_a_slow_rollouter_counts_correctly_after_older_versions_are_forgotten() -> None:
    gate = make_gate(staleness_max=3)
    for version in (1, 2, 3):
        publish(gate, version, 4 * version)
    before = [gate.room(served, 0) for served in (2, 3)]
    gate.forget_below(2)
    gate.forget_below(-1)
    assert [gate.room(served, 0) for served in (1, 2, 3)] == [0, *before]


def test_the_gate_admits_no_more_groups_than_the_run_needs() -> None:
    gate = make_gate(run=10)
    assert admitted(gate, 0) == 8
    publish(gate, 2, 8)
    assert (admitted(gate, 2), gate.needed(1)) == (2, 1)
    gate.finished = True
    assert gate.needed(0) == admitted(gate, 2) == 0


@pytest.mark.parametrize(("rollouters", "share"), [(1, 8), (2, 4), (3, 3), (64, 1)])
def test_no_rollouter_generates_more_than_its_share_of_the_places(rollouters: int, share: int) -> None:
    gate = make_gate()
    assert gate.admits(0, outstanding=0, generating=share - 1, rollouters=rollouters)
    assert not gate.admits(0, outstanding=0, generating=share, rollouters=rollouters)


@pytest.mark.parametrize(
    ("served", "outstanding", "generating", "grows"),
    [(0, 8, 0, True), (0, 0, 8, True), (0, 7, 0, False), (0, 20, 0, False), (-1, 8, 0, False)],
)
def test_only_a_refusal_by_the_limit_lets_it_grow(served: int, outstanding: int, generating: int, grows: bool) -> None:
    gate = make_gate(staleness_max=4, run=20, adapt=True)
    gate.admits(served, outstanding=outstanding, generating=generating, rollouters=1)
    gate.limit.step_began(0, waited=True)
    assert (gate.limit.versions > 1) is grows


@given(st.integers(0, 5), st.integers(1, 8), st.integers(0, 9), st.integers(0, 80), st.integers(0, 80))
def test_admission_stays_within_the_bound(
    staleness_max: int, groups: int, served: int, trained: int, outstanding: int
) -> None:
    gate = make_gate(staleness_max=staleness_max, groups=groups)
    for version in range(1, 10):
        gate.published(version, version * groups)
    gate.trained = trained
    bound = served * groups + (staleness_max + 1) * groups
    assert admitted(gate, served, outstanding) == max(0, min(bound, 1000) - trained - outstanding)


@pytest.mark.parametrize(
    ("made", "events", "groups"),
    [
        # It starts at one version.
        ({}, "", 8),
        ({"staleness_max": 0}, "", 0),
        # Without adaptation it stays at the maximum.
        ({"adapt": False}, "rw" + 20 * "f", 32),
        # A wait without a refusal changes nothing, and a refusal counts for one step only.
        ({}, "w", 8),
        ({}, "rsw", 8),
        # It grows by half a version, and by one group at least, up to the maximum.
        ({}, "rwrw", 16),
        ({}, 7 * "rw", 32),
        ({"step": 1, "version": 1}, "rw", 2),
        # It shrinks by a sixteenth of a step after full steps in a row alone.
        ({}, (PATIENCE - 1) * "f" + "s" + (PATIENCE - 1) * "f", 8),
        ({"step": 16, "version": 16}, (PATIENCE + 1) * "f", 14),
        ({}, 150 * "f", 0),
    ],
)
def test_refusals_waits_and_full_steps_make_the_limit(made: dict[str, Any], events: str, groups: int) -> None:
    """A rollouter is (r)efused; a (s)tep begins, one that (w)aited, or one with a (f)ull buffer behind it."""
    limit = make_limit(**made)
    for event in events:
        if event == "r":
            limit.refused()
        else:
            limit.step_began(made.get("step", 8) * (event == "f"), waited=event == "w")
    assert limit.groups == groups

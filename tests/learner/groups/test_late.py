"""Groups that are requeued, and those that the next step waits for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import make_group, make_sequence, make_trajectory
from msgspec.structs import replace

from asyncrl.config.training import StalenessConfig
from asyncrl.learner.algorithm.advantage.group_metrics import requeue_metrics
from asyncrl.learner.groups.buffer import GroupBuffer
from asyncrl.learner.groups.late import Calendar, NextGroups, choose_step, to_requeue
from asyncrl.messages.dataloader import OpenGrant
from asyncrl.messages.groups import Group
from asyncrl.trajectories import is_late


def group(index: int, version: int | list[int], tokens: int = 2) -> Group:
    return make_group(index, [1], [make_trajectory(list(range(tokens)), version=version) for _ in range(2)])


def chosen(buffered: list[int], outstanding: list[int], calendar: Calendar) -> NextGroups:
    """The choice of a step of two groups, of which all are known."""
    buffer = GroupBuffer()
    for index, version in enumerate(buffered):
        buffer.add(group(index, version))
    grants = [OpenGrant(f"1-{index}", version, "rollouter/3") for index, version in enumerate(outstanding)]
    return choose_step(buffer, set(buffer.uids), grants, calendar, 2)


def test_the_oldest_token_of_any_sequence_makes_a_group_late() -> None:
    forked = [make_sequence([1, 2], versions=[4, 4]), make_sequence([1, 2, 3], roles="crs", versions=[0, 0, 3])]
    late = make_group(0, [1], [make_trajectory([1], version=5), make_trajectory(sequences=forked)])
    assert [is_late(late, version, 1) for version in (4, 5, 6)] == [False, True, True]


@pytest.mark.parametrize(
    ("versions", "known", "told", "requeued"),
    [
        ([[2, 5], 4], {"0-0": 1}, {}, ["0-0"]),
        ([2, 3], {"0-0": 2}, {}, ["0-1"]),
        # A restored ledger may know of less than the ticket.
        ([2, 3], {}, {"0-0": 2}, ["0-1"]),
    ],
)
def test_what_is_late_is_requeued_so_often_and_no_more(versions, known, told, requeued) -> None:
    groups = [group(index, version) for index, version in enumerate(versions)]
    groups = [replace(each, ticket=replace(each.ticket, requeues=told.get(each.ticket.uid, 0))) for each in groups]
    staleness = StalenessConfig(max=1, late="requeue", max_requeues=2)
    assert to_requeue(groups, known, 5, staleness) == requeued


def test_a_version_is_left_after_its_groups_and_then_after_so_many_each() -> None:
    calendar = Calendar(version=7, left=2, per_version=4, limit=0)
    trained_at = [next(v for v in range(20) if calendar.on_time([*[-99] * place, v])) for place in range(12)]
    assert trained_at == [7] * 2 + [8] * 4 + [9] * 4 + [10] * 2


@pytest.mark.parametrize(
    ("buffered", "outstanding", "version", "waits_for"),
    [
        ([4, 5, 5], [5], 5, None),
        # Another step would leave 1-0 behind, which version 5 may train and version 6 not.
        ([4, 5], [4, 5], 5, "1-0"),
        # There is room for two of that version, but not in two steps' time for three.
        ([5, 5], [5, 5], 5, None),
        ([6, 6], [6, 6, 5, 5], 6, "1-2"),
        # Nothing can bring these in any more.
        ([2, 5], [3, 2, -1], 5, None),
    ],
)
def test_a_step_waits_for_whom_it_would_make_late(buffered, outstanding, version, waits_for) -> None:
    found = chosen(buffered, outstanding, Calendar(version, 2, 2, 1))
    assert (found.waits_for and found.waits_for.uid) == waits_for
    assert len(found.step) == (2 if waits_for is None else 0)


def test_only_groups_make_a_step_that_were_granted_before_the_dataloader_told() -> None:
    buffer, calendar = GroupBuffer(), Calendar(5, 2, 2, 1)
    for index in range(3):
        buffer.add(group(index, 5))
    assert choose_step(buffer, {"0-1", "0-2"}, [], calendar, 2).step == ("0-1", "0-2")
    assert choose_step(buffer, {"0-1"}, [], calendar, 2) == NextGroups()


@given(
    buffered=st.lists(st.integers(0, 6), min_size=2, max_size=6),
    outstanding=st.lists(st.integers(0, 6), max_size=4),
    left=st.sampled_from([2, 4]),
    limit=st.integers(0, 3),
)
def test_it_waits_exactly_where_some_other_order_would_have_more_groups_on_time(
    buffered, outstanding, left, limit
) -> None:
    """Against all orders, where all can be on time; and with nothing outstanding it never waits."""
    calendar, everything = Calendar(6, left, 4, limit), buffered + outstanding
    found = chosen(buffered, outstanding, calendar)
    assert found.step or outstanding
    if calendar.on_time(sorted(everything)) < len(everything):
        return
    feasible = False
    for step in map(list, itertools.combinations(buffered, 2)):
        left_over = list(everything)
        for each in step:
            left_over.remove(each)
        feasible |= calendar.on_time(step + sorted(left_over)) == len(everything)
    assert bool(found.step) == feasible


def test_the_length_of_what_is_requeued_is_held_against_that_of_what_is_trained() -> None:
    assert requeue_metrics([group(0, 5, tokens=2), group(1, 5, tokens=4)], [group(2, 5, tokens=9)]) == {
        "staleness/requeued_groups": 1.0,
        "staleness/requeued_length_mean": 9.0,
        "staleness/trained_length_mean": 3.0,
    }
    assert requeue_metrics([], []) == {"staleness/requeued_groups": 0.0}

"""Rates and shares between two snapshots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from top.pictures import Run

from asyncrl.messages.monitor import ActorView, Histogram, Interval, Resource, RunView, Snapshot
from asyncrl.top.view import mean, time_mean, total


def snapshot(wall, *actors):
    run = RunView(name="r", run_id="i", phase="running", attempt=1, age_s=wall, step=0, steps=1, version=0)
    return Snapshot(wall=wall, run=run, actors=list(actors))


def actor(tokens=None, *, incarnation=1, heard_s=0.0, seconds=None, name="rollouter/0"):
    return ActorView(
        name=name,
        host="h",
        condition="ready",
        incarnation=incarnation,
        heard_s=heard_s,
        metrics={} if tokens is None else {"rollout/sampled_tokens": tokens},
        resources=[] if seconds is None else [Resource(name="engine", state="waiting", seconds=seconds)],
    )


def rate(older, newer, wall=10.0):
    return Interval(snapshot(0.0, older), snapshot(wall, newer)).rate(newer, "rollout/sampled_tokens")


def test_a_rate_is_over_the_time_between_heartbeats_and_not_between_snapshots():
    assert rate(actor(100.0, heard_s=1.0), actor(1000.0, heard_s=2.0)) == pytest.approx(900 / 9)


def test_an_unknown_rate_is_never_zero():
    assert rate(actor(None), actor(None)) is None
    assert rate(actor(100.0, heard_s=0.0), actor(100.0, heard_s=10.0)) is None, "it was not heard in between"
    assert rate(actor(1000.0), actor(50.0, incarnation=2)) is None, "when it started is not known"
    newer = actor(5.0)
    assert Interval(None, snapshot(1.0, newer)).rate(newer, "rollout/sampled_tokens") is None
    assert total([None, None]) is None and total([None, 2.0]) == 2.0
    assert mean([None]) is None and mean([None, 2.0, 4.0]) == 3.0


@pytest.mark.parametrize(
    ("moments", "found"),
    [
        ([], None),
        ([(0.0, None)], None),
        ([(5.0, 2.0)], 2.0),
        ([(0.0, 0.0), (1.0, 2.0)], 1.0),
        # However closely it is looked at.
        ([(0.0, 0.0), (1.0, 2.0), (1.1, 2.0), (1.2, 2.0), (2.0, 2.0)], 1.5),
        ([(0.0, 4.0), (1.0, None), (2.0, 6.0)], 5.0),
        ([(0.0, None), (3.0, 6.0), (3.0, 8.0)], 7.0),
    ],
)
def test_the_mean_of_a_level_over_time(moments, found):
    assert time_mean(moments) == (None if found is None else pytest.approx(found))


def test_a_resource_replaced_inside_its_actor_starts_at_zero():
    older, newer = actor(seconds={"generating": 100.0}), actor(seconds={"generating": 3.0, "waiting": 1.0})
    interval = Interval(snapshot(0.0, older), snapshot(4.0, newer))
    assert interval.shares([(newer, newer.resources[0])]) == {"generating": 0.75, "waiting": 0.25}


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ({"starting": 1.0, "generating": 36_000.0}, {}),
        ({"generating": 36_000.0}, {}),
        ({"starting": 30.0, "generating": 1.5}, {"starting": 0.5, "generating": 1.5}),
        ({"starting": 30.0, "generating": 2.0}, {"generating": 2.0}),
        ({"starting": 1.0, "generating": 0.5}, {"starting": 1.0, "generating": 0.5}),
    ],
)
@pytest.mark.parametrize("before", [(), (actor(seconds={"generating": 9e9}),)], ids=["absent", "another one"])
def test_times_of_a_new_resource_are_shown_only_if_they_fit_the_interval(before, seconds, found):
    newer = actor(seconds=seconds, incarnation=2)
    interval = Interval(snapshot(0.0, *before), snapshot(2.0, newer))
    assert interval.seconds_by_state(newer, newer.resources[0]) == pytest.approx(found)
    assert sum(interval.shares([(newer, newer.resources[0])]).values()) == pytest.approx(1.0 if found else 0.0)


def test_histograms_are_subtracted():
    older, newer = actor(), actor()
    older.histograms["h"], newer.histograms["h"] = Histogram([1, 2], 3.0), Histogram([1, 5], 9.0)
    assert Interval(snapshot(0.0, older), snapshot(1.0, newer)).histogram(newer, "h") == Histogram([0, 3], 6.0)


@given(st.floats(1.0, 500.0), st.floats(0.5, 500.0), st.integers(1, 5))
def test_shares_add_up_to_the_whole(start, length, rollouters):
    run = Run(rollouters=rollouters)
    older, newer = run.at(start), run.at(start + length)
    interval = Interval(older, newer)
    every = [(actor, resource) for actor in newer.actors for resource in actor.resources]
    assert sum(interval.shares(every).values()) == pytest.approx(1.0)
    for actor, resource in every:
        assert sum(interval.seconds_by_state(actor, resource).values()) == pytest.approx(length, rel=1e-6)

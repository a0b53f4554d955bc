"""Figures that the scale benchmark makes of snapshots, and of a screen that nobody sees."""

import time
from dataclasses import replace

import pytest

from asyncrl.errors import ActorFailed
from asyncrl.snapshot import ActorView, Histogram, RunView, Snapshot
from asyncrl.telemetry.catalogue import EDGES
from tools.bench import scale_collective
from tools.bench.report import Report
from tools.bench.scale_phases import RECOVERY_S, broken, frozen, steady
from tools.bench.scale_report import CONTROL_PLANE, LAG, LAG_TARGET_S, lost, report_all, report_phase
from tools.bench.scale_run import (
    READY_S,
)
from tools.bench.scale_top import Drawing, drawing
from tools.bench.scale_watch import FULL_S, Follower, Seen, Watched

TICKETS = {"granted": 10.0, "trained": 4.0, "filtered": 1.0, "quarantined": 1.0, "returned": 1.0, "outstanding": 3.0}


STEADY = steady(8)


def lag(*, early, late):
    """A histogram of so many samples at most at the target, and so many above it."""
    at = EDGES[LAG].index(LAG_TARGET_S)
    counts = [0] * (len(EDGES[LAG]) + 1)
    counts[at], counts[at + 1] = early, late
    return Histogram(counts, 0.0)


def actor(name, *, condition="ready", late=0, early=0, **figures):
    return ActorView(
        name=name,
        host="h",
        condition=condition,
        incarnation=1,
        figures=figures,
        histograms={LAG: lag(early=early, late=late)} if early + late else {},
    )


def snapshot(wall, *, tickets=TICKETS, learner=None, faults=None, late=0, early=0, weights=None, run=None):
    of_tickets = {f"tickets/{kind}": count for kind, count in tickets.items()}
    actors = [
        actor(
            "controller/0",
            early=early,
            **{"snapshots/bytes": 1e5, "snapshots/take_s": 0.01, "facts/cpu_s": wall * 0.002} | (faults or {}),
        ),
        actor("dataloader/0", early=early, **of_tickets),
        learner or actor("learner/0", early=early, late=late),
        actor("parameter_server/0", early=early, **{f"weights/{name}": of for name, of in (weights or {}).items()}),
        actor("reward/0", early=early),
    ]
    known = {"name": "r", "run_id": "i", "phase": "running", "attempt": 1, "age_s": wall, "step": 0, "steps": 1}
    return Snapshot(wall=wall, run=RunView(**known | {"version": 0} | (run or {})), actors=actors)


def reported(last, shown=None, phase=STEADY):
    report = Report("scale")
    seen = Seen(phase, snapshot(0.0), last, snapshots=20, in_flight=[512.0])
    report_phase(report, seen)
    report_all(report, Watched([seen], drawing=shown), 1000)
    return report


def test_nothing_is_lost_when_every_granted_group_is_accounted_for_and_what_went_wrong_was_before():
    assert lost(snapshot(0.0), snapshot(9.0)) == {}
    faults = {"wire/unsent": 2.0}
    assert lost(snapshot(0.0, faults=faults), snapshot(9.0, faults=faults)) == {}


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ({"tickets": TICKETS | {"trained": 3.0}}, {"groups not accounted for": 1.0}),
        ({"tickets": TICKETS | {"trained": 5.0}}, {"groups not accounted for": -1.0}),
        ({"faults": {"wire/unsent": 2.0}}, {"wire/unsent": 2.0}),
        ({"learner": actor("learner/0", condition="silent")}, {"actors that are not ready": 1}),
    ],
)
def test_what_went_wrong_is_told(what, found):
    assert lost(snapshot(0.0), snapshot(9.0, **what)) == found


def test_who_is_dead_is_turned_away_and_what_it_held_is_granted_again():
    tickets = TICKETS | {"granted": 12.0, "recovered": 2.0}
    after = snapshot(9.0, tickets=tickets, faults={"wire/refused": 3.0, "heartbeats/ignored": 1.0})
    assert lost(snapshot(0.0), after, of_the_dead=True) == {}
    assert set(lost(snapshot(0.0), after)) == {"wire/refused", "heartbeats/ignored"}
    unsent = snapshot(9.0, faults={"wire/unsent": 1.0})
    assert lost(snapshot(0.0), unsent, of_the_dead=True) == {"wire/unsent": 1.0}


@pytest.mark.parametrize(("late", "met"), [(1, True), (2, False)])
def test_the_lag_is_met_exactly_if_no_more_than_one_in_a_hundred_is_above(late, met):
    report = reported(snapshot(10.0, early=100 - late, late=late))
    assert report.met["steady_lag_p99_learner_s"] is met and report.met["steady_lag_p99_controller_s"]
    assert report.figures["steady"]["lag_learner"]["over_50ms_share"] == late / 100
    assert {f"steady_lag_p99_{name.partition('/')[0]}_s" for name in CONTROL_PLANE} <= report.met.keys()


def test_a_lag_that_nobody_told_meets_nothing():
    with pytest.raises(ActorFailed, match="learner/0"):
        reported(snapshot(10.0, early=100, learner=actor("learner/0")))


def test_something_lost_misses_the_target():
    lossy = snapshot(10.0, early=9, faults={"records/lost": 1.0})
    assert reported(lossy).met["steady_lost"] is False and reported(snapshot(10.0, early=9)).met["steady_lost"]
    turned_away = snapshot(10.0, early=9, faults={"wire/refused": 1.0})
    assert reported(turned_away).met["steady_lost"] is False
    assert reported(turned_away, phase=frozen(None, 60.0)).met["frozen_lost"]


def test_the_facts_are_a_share_of_the_actors_time():
    report = reported(snapshot(10.0, early=100))
    of_the_lag = 100 * 3e-6 / 10
    assert report.ratios["facts_share"] == pytest.approx(0.002 + of_the_lag)


def test_a_second_without_drawing_misses_the_target():
    good = Drawing(cores=0.05, seconds_share=1.0, longest_s=0.6, measured_s=20.0)
    assert all(reported(snapshot(10.0, early=9), good).met.values())
    missed = reported(snapshot(10.0, early=9), replace(good, seconds_share=0.95))
    assert missed.met["top_drawn_seconds"] is False
    assert reported(snapshot(10.0, early=9), replace(good, cores=0.2)).met["top_cores"] is False


def test_drawing_is_counted_by_whole_seconds_from_the_first_picture():
    assert drawing([], 9.0, 1.0) is None and drawing([8.5], 9.0, 1.0) is None
    every = drawing([5.0, 5.9, 6.1, 7.8], 8.4, 0.34)
    assert every == Drawing(pytest.approx(0.1), 1.0, pytest.approx(1.7), pytest.approx(3.4))
    missed = drawing([5.0, 5.5, 7.2], 8.9, 0.0)
    assert missed is not None and missed.seconds_share == pytest.approx(2 / 3)


def test_a_steady_phase_is_over_after_its_steps_and_not_at_once():
    first = snapshot(0.0, run={"step": 5})
    is_over = steady(3).is_over
    assert not is_over(first, snapshot(9.0, run={"step": 8}), 9.0)
    assert not is_over(first, snapshot(90.0, run={"step": 7}), 90.0)
    assert is_over(first, snapshot(90.0, run={"step": 8}), 90.0)


@pytest.mark.parametrize(
    ("learner", "step", "seconds", "over"),
    [("ready", 1, 90.0, True), ("ready", 0, 90.0, False), ("silent", 1, 90.0, False), ("ready", 1, 61.0, False)],
)
def test_a_frozen_phase_is_over_when_all_are_back_and_a_step_is_trained(learner, step, seconds, over):
    now = snapshot(seconds, learner=actor("learner/0", condition=learner), run={"step": step})
    assert frozen(None, 60.0).is_over(snapshot(0.0), now, seconds) is over


@pytest.mark.parametrize(
    ("weights", "over"),
    [
        ({"broadcasts_broken": 2, "broadcasts_begun": 6, "replicas_behind": 0}, True),
        ({"broadcasts_broken": 2, "broadcasts_begun": 5, "replicas_behind": 0}, False),
        ({"broadcasts_broken": 2, "broadcasts_begun": 6, "replicas_behind": 1}, False),
        ({"broadcasts_broken": 1, "broadcasts_begun": 6, "replicas_behind": 0}, False),
    ],
)
def test_a_broken_broadcast_is_over_when_one_has_gone_well_for_all(tmp_path, weights, over):
    first = snapshot(0.0, weights={"broadcasts_broken": 1, "broadcasts_begun": 4, "replicas_behind": 0})
    assert broken(tmp_path).is_over(first, snapshot(60.0, weights=weights), 60.0) is over


class Watching:
    """A follower of a run of six actors and 100 trajectories, and what it says."""

    def __init__(self, phases):
        self.said, self.over = [], []
        self.follower = Follower(6, 100, phases, say=self.said.append, over=self.over.append)
        self.began = time.monotonic()

    def see(self, seconds, *, in_flight=0.0, **run):
        seen = snapshot(seconds, learner=actor("learner/0", **{"rollout/in_flight": in_flight}), run=run)
        return self.follower.see(seen, self.began + seconds)


STARTING = {"phase": "starting", "waiting_for": ["rollouter/0", "rollouter/1"]}


@pytest.mark.parametrize(
    ("run", "in_flight", "longest_s", "told"),
    [
        (STARTING, 0.0, READY_S, "4 of 6 actors ready; not ready: rollouter/0, rollouter/1"),
        ({}, 30.0, FULL_S, "30 of 100 trajectories in flight, 0 steps"),
        ({"step": 1}, 95.0, steady(1).longest_s, "steady: 0 steps, 95 in flight"),
    ],
)
def test_whatever_takes_too_long_fails_and_says_how_far_it_came(run, in_flight, longest_s, told):
    watching = Watching([steady(1)])
    watching.see(1.0, in_flight=in_flight, **run)
    watching.see(longest_s - 1.0, in_flight=in_flight, **run)
    with pytest.raises(ActorFailed, match=told):
        watching.see(longest_s + 2.0, in_flight=in_flight, **run)


def test_phases_follow_one_another_and_each_is_given_on_when_it_is_over(tmp_path):
    (tmp_path / scale_collective.FOLDER).mkdir()
    watching = Watching([steady(1), broken(tmp_path)])
    watching.see(10.0, **STARTING)
    watching.see(20.0, in_flight=100.0)
    assert watching.follower.watched.phases == []
    watching.see(30.0, in_flight=100.0, step=1)
    assert not watching.see(60.0, in_flight=90.0, step=2)
    (over,) = watching.over
    assert (over.phase.name, over.first.run.step, over.last.run.step, over.in_flight) == ("steady", 1, 2, [90.0])
    assert [path.name for path in (tmp_path / scale_collective.FOLDER).iterdir()] == ["break"]
    with pytest.raises(ActorFailed, match="broken: 1 steps"):
        watching.see(61.0 + RECOVERY_S, in_flight=90.0, step=3)
    watched = watching.follower.watched
    assert (round(watched.ready_s), round(watched.first_step_s)) == (20, 30)


def test_a_run_that_ends_by_itself_is_a_failure():
    with pytest.raises(ActorFailed, match="reward/0 died"):
        Watching([steady(1)]).see(1.0, phase="draining", reason="reward/0 died")

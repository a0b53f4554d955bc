"""Metrics of the benchmarks of scale and of idle rollouters, from snapshots."""

import time

import pytest

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import ActorView, Histogram, RunView, Snapshot
from asyncrl.observe.catalogue import edges_of
from tools.bench import scale_collective
from tools.bench.idle import Mark, Part, part_of, report_idle, report_start
from tools.bench.report import Report
from tools.bench.scale_report import CONTROL_PLANE, LAG, LAG_TARGET_S, lost, report_all, report_phase
from tools.bench.scale_run import READY_S
from tools.bench.scale_watch import FULL_S, RECOVERY_S, Follower, Seen, Watched, broken, frozen, steady

TICKETS = {"granted": 10.0, "trained": 4.0, "filtered": 1.0, "quarantined": 1.0, "returned": 1.0, "outstanding": 3.0}
STEADY = steady(8)


def actor(name, *, condition="ready", late=0, early=0, **figures):
    """An actor with this many samples of its lag at most at the target, and this many above it."""
    at = edges_of(LAG).index(LAG_TARGET_S)
    counts = [0] * (len(edges_of(LAG)) + 1)
    counts[at], counts[at + 1] = early, late
    histograms = {LAG: Histogram(counts, 0.0)} if early + late else {}
    return ActorView(name=name, host="h", condition=condition, incarnation=1, metrics=figures, histograms=histograms)


def snapshot(wall, *, tickets=TICKETS, learner=None, faults=None, late=0, early=0, weights=None, run=None):
    told = {"snapshots/bytes": 1e5} | (faults or {})
    actors = [
        actor("controller/0", early=early, **told),
        actor("dataloader/0", early=early, **{f"tickets/{kind}": count for kind, count in tickets.items()}),
        learner or actor("learner/0", early=early, late=late),
        actor("parameter_server/0", early=early, **{f"weights/{name}": of for name, of in (weights or {}).items()}),
        actor("reward/0", early=early),
    ]
    known = {"name": "r", "run_id": "i", "phase": "running", "attempt": 1, "age_s": wall, "step": 0, "steps": 1}
    return Snapshot(wall=wall, run=RunView(**known | {"version": 0} | (run or {})), actors=actors)


def reported(last, phase=STEADY):
    report = Report("scale")
    seen = Seen(phase, snapshot(0.0), last, snapshots=20, in_flight=[512.0])
    report_phase(report, seen)
    report_all(report, Watched([seen]), 1000)
    return report


TURNED_AWAY = {
    "tickets": TICKETS | {"granted": 12.0, "recovered": 2.0},
    "faults": {"wire/refused": 3.0, "heartbeats/ignored": 1.0},
}


@pytest.mark.parametrize(
    ("what", "of_the_dead", "found"),
    [
        ({}, False, {}),
        ({"tickets": TICKETS | {"trained": 3.0}}, False, {"groups not accounted for": 1.0}),
        ({"tickets": TICKETS | {"trained": 5.0}}, False, {"groups not accounted for": -1.0}),
        ({"faults": {"wire/unsent": 2.0}}, False, {"wire/unsent": 2.0}),
        ({"learner": actor("learner/0", condition="silent")}, False, {"actors that are not ready": 1}),
        # A dead rollouter is refused, and its groups are leased again.
        (TURNED_AWAY, True, {}),
        (TURNED_AWAY, False, {"wire/refused": 3.0, "heartbeats/ignored": 1.0}),
        ({"faults": {"wire/unsent": 1.0}}, True, {"wire/unsent": 1.0}),
    ],
)
def test_failures_are_reported(what, of_the_dead, found):
    assert lost(snapshot(0.0), snapshot(9.0, **what), of_the_dead=of_the_dead) == found
    before = snapshot(0.0, faults=what.get("faults"))
    assert not {"wire/unsent", "wire/refused"} & set(lost(before, snapshot(9.0, **what)))


def test_targets_are_met_or_missed():
    for late, met in ((1, True), (2, False)):
        report = reported(snapshot(10.0, early=100 - late, late=late))
        assert report.met["steady_lag_p99_learner_s"] is met and report.met["steady_lag_p99_controller_s"]
        assert report.figures["steady"]["lag_learner"]["over_50ms_share"] == late / 100
        assert {f"steady_lag_p99_{name.partition('/')[0]}_s" for name in CONTROL_PLANE} <= report.met.keys()
    with pytest.raises(ActorFailed, match="learner/0"):
        reported(snapshot(10.0, early=100, learner=actor("learner/0")))
    assert reported(snapshot(10.0, early=9, faults={"records/lost": 1.0})).met["steady_lost"] is False
    turned_away = snapshot(10.0, early=9, faults={"wire/refused": 1.0})
    assert reported(turned_away).met["steady_lost"] is False
    assert reported(turned_away, phase=frozen(None, 60.0)).met["frozen_lost"]


@pytest.mark.parametrize(
    ("phase", "now", "seconds", "over"),
    [
        (steady(3), {"run": {"step": 3}}, 9.0, False),
        (steady(3), {"run": {"step": 2}}, 90.0, False),
        (steady(3), {"run": {"step": 3}}, 90.0, True),
        (frozen(None, 60.0), {"run": {"step": 1}}, 90.0, True),
        (frozen(None, 60.0), {"run": {"step": 0}}, 90.0, False),
        (frozen(None, 60.0), {"run": {"step": 1}, "learner": actor("learner/0", condition="silent")}, 90.0, False),
        (frozen(None, 60.0), {"run": {"step": 1}}, 61.0, False),
        (broken(None), {"weights": {"broadcasts_broken": 2, "broadcasts_begun": 6, "replicas_behind": 0}}, 60.0, True),
        (broken(None), {"weights": {"broadcasts_broken": 2, "broadcasts_begun": 5, "replicas_behind": 0}}, 60.0, False),
        (broken(None), {"weights": {"broadcasts_broken": 2, "broadcasts_begun": 6, "replicas_behind": 1}}, 60.0, False),
        (broken(None), {"weights": {"broadcasts_broken": 1, "broadcasts_begun": 6, "replicas_behind": 0}}, 60.0, False),
    ],
)
def test_a_phase_ends_after_its_condition_holds_and_not_at_once(phase, now, seconds, over):
    first = snapshot(0.0, weights={"broadcasts_broken": 1, "broadcasts_begun": 4, "replicas_behind": 0})
    assert phase.is_over(first, snapshot(seconds, **now), seconds) is over


class Watching:
    """A follower of a run of six actors and 100 trajectories, and its output."""

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
        ({"phase": "draining", "reason": "reward/0 died"}, 0.0, 0.0, "reward/0 died"),
    ],
)
def test_a_phase_that_takes_too_long_or_dies_fails_and_reports_its_progress(run, in_flight, longest_s, told):
    watching = Watching([steady(1)])
    if longest_s:
        watching.see(1.0, in_flight=in_flight, **run)
        watching.see(longest_s - 1.0, in_flight=in_flight, **run)
    with pytest.raises(ActorFailed, match=told):
        watching.see(longest_s + 2.0, in_flight=in_flight, **run)


def test_phases_follow_one_another_and_each_is_handed_on_when_it_ends(tmp_path):
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


# --- idle rollouters and the start ---


def test_the_time_of_a_part_of_the_start_lies_between_its_marks():
    marks = [Mark(0.0, 1.0, 0), Mark(2.0, 3.0, 100), Mark(4.0, 3.5, 100), Mark(10.0, 8.0, 400)]
    assert part_of(marks, 0, 50) == Part(1.0, 1.0)
    assert part_of(marks, 0, 100) == Part(2.0, 2.0)
    assert part_of(marks, 300, 400) == Part(2.0, 1.5)
    with pytest.raises(ValueError, match="401 rollouters were never ready"):
        part_of(marks, 0, 401)


def test_the_cost_of_an_idle_rollouter_and_the_slowdown_of_the_start_are_measured():
    report = Report("idle")
    slices = [{"rollouters": cores, "controller": 0.1} for cores in (0.2, 0.4, 0.9)]
    report_idle(report, slices, 400)
    assert report.figures["idle"]["rollouters"] == {"ms_per_s": 1.0, "low": 0.5, "high": 2.25}
    assert report.figures["idle"]["all"]["ms_per_s"] == 1.25
    report_start(report, [Mark(0.0, 0.0, 0), Mark(2.0, 3.0, 100), Mark(12.0, 6.0, 400)])
    assert report.ratios["start_last_over_first"] == pytest.approx(10 / 3 / 2)
    assert report.met == {"start_last_over_first": False, "start_cpu_last_over_first": True}

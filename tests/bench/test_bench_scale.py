"""Metrics of the benchmark of scale, from snapshots."""

import asyncio

import pytest

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.monitor import ActorView, Histogram, RunView, Snapshot
from asyncrl.observe.catalogue import edges_of
from tools.bench.report import Report
from tools.bench.scale import CONTROL_PLANE, LAG, LAG_TARGET_S, Watch, lost, report_phase

TICKETS = {"granted": 10.0, "trained": 4.0, "filtered": 1.0, "quarantined": 1.0, "returned": 1.0, "outstanding": 3.0}


def actor(name, *, condition="ready", late=0, early=0, **figures):
    """An actor with this many samples of its lag at most at the target, and this many above it."""
    at = edges_of(LAG).index(LAG_TARGET_S)
    counts = [0] * (len(edges_of(LAG)) + 1)
    counts[at], counts[at + 1] = early, late
    histograms = {LAG: Histogram(counts, 0.0)} if early + late else {}
    return ActorView(name=name, host="h", condition=condition, incarnation=1, metrics=figures, histograms=histograms)


def snapshot(wall, *, tickets=TICKETS, learner=None, faults=None, late=0, early=0, run=None):
    message = {"snapshots/bytes": 1e5} | (faults or {})
    actors = [
        actor("controller/0", early=early, **message),
        actor("dataloader/0", early=early, **{f"tickets/{kind}": count for kind, count in tickets.items()}),
        learner or actor("learner/0", early=early, late=late),
        actor("parameter_server/0", early=early),
        actor("reward/0", early=early),
    ]
    known = {"name": "r", "run_id": "i", "phase": "running", "attempt": 1, "age_s": wall, "step": 0, "steps": 1}
    return Snapshot(wall=wall, run=RunView(**known | {"version": 0} | (run or {})), actors=actors)


def reported(last, **options):
    report = Report("scale")
    report_phase(report, "steady", snapshot(0.0), last, **options)
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
    assert reported(turned_away, of_the_dead=True).met["steady_lost"]


class Snapshots:
    """The snapshots of a viewer, and a run whose processes live."""

    def __init__(self, *snapshots):
        self._left = snapshots

    async def __aiter__(self):
        for each in self._left:
            yield each

    def check(self):
        pass


def watch(done, longest_s, *snapshots):
    run = Snapshots(*snapshots)
    return asyncio.run(Watch(run, run, print).until(done, longest_s, "steady"))


STARTING = {"phase": "starting", "waiting_for": ["rollouter/0", "rollouter/1"]}


@pytest.mark.parametrize(
    ("run", "longest_s", "message"),
    [
        (STARTING, 0.0, "steady: 0 steps, 30 in flight; 2 not ready: rollouter/0, rollouter/1"),
        ({"phase": "draining", "reason": "reward/0 died"}, 60.0, "reward/0 died"),
        ({}, 60.0, "the controller is gone"),
    ],
)
def test_a_wait_past_its_limit_or_a_dead_run_fails_and_reports_the_progress(run, longest_s, message):
    seen = snapshot(1.0, learner=actor("learner/0", **{"rollout/in_flight": 30.0}), run=run)
    with pytest.raises(ActorFailed, match=message):
        watch(lambda now, seconds: False, longest_s, seen)


def test_a_wait_ends_with_the_first_snapshot_that_is_done():
    seen = [snapshot(float(step), run={"step": step}) for step in range(4)]
    assert watch(lambda now, seconds: now.run.step >= 2, 60.0, *seen) is seen[2]

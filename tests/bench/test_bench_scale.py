"""What the scale benchmark makes of snapshots, and of a screen that nobody sees."""

import os
import pty
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import ActorFailed
from asyncrl.launcher.folders import RunFolder
from asyncrl.monitor.catalogue import EDGES
from asyncrl.snapshot import ActorView, Histogram, RunView, Snapshot
from tools.bench.report import Report
from tools.bench.scale_report import LAG, LAG_TARGET_S, lost, report_all
from tools.bench.scale_run import PROCESSES_PER_CPU, Processes, per_process
from tools.bench.scale_terminal import Terminal
from tools.bench.scale_top import Drawing, Top, drawing
from tools.bench.scale_watch import Watched

TICKETS = {"granted": 10.0, "trained": 4.0, "filtered": 1.0, "quarantined": 1.0, "returned": 1.0, "outstanding": 3.0}


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


def snapshot(wall, *, tickets=TICKETS, learner=None, faults=None, late=0, early=0):
    of_tickets = {f"tickets/{kind}": count for kind, count in tickets.items()}
    actors = [
        actor(
            "controller/0",
            early=early,
            **{"snapshots/bytes": 1e5, "snapshots/take_s": 0.01, "facts/cpu_s": wall * 0.002} | (faults or {}),
        ),
        actor("dataloader/0", early=early, **of_tickets),
        learner or actor("learner/0", early=early, late=late),
    ]
    run = RunView(name="r", run_id="i", phase="running", attempt=1, age_s=wall, step=0, steps=1, version=0)
    return Snapshot(wall=wall, run=run, actors=actors)


def reported(last, shown=None):
    report = Report("scale")
    seen = Watched(snapshot(0.0), last, last, snapshots=20, in_flight=[512.0], most_in_flight=512, drawing=shown)
    report_all(report, seen, 1000)
    return report


def test_nothing_is_lost_when_every_granted_group_is_accounted_for():
    assert lost(snapshot(0.0)) == {}


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
    assert lost(snapshot(0.0, **what)) == found


@pytest.mark.parametrize(("late", "met"), [(1, True), (2, False)])
def test_the_lag_is_met_exactly_if_no_more_than_one_in_a_hundred_is_above(late, met):
    report = reported(snapshot(10.0, early=100 - late, late=late))
    assert report.met["lag_p99_learner_s"] is met and report.met["lag_p99_controller_s"]
    assert report.figures["lag_learner"]["over_50ms_share"] == late / 100


def test_a_lag_that_nobody_told_meets_nothing():
    with pytest.raises(ActorFailed, match="learner/0"):
        reported(snapshot(10.0, early=100, learner=actor("learner/0")))


def test_something_lost_misses_the_target():
    lossy = snapshot(10.0, early=9, faults={"records/lost": 1.0})
    assert reported(lossy).met["lost"] is False and reported(snapshot(10.0, early=9)).met["lost"]


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


def test_a_screen_that_has_ended_is_a_failure(tmp_path):
    screen = Top(tmp_path / "no-such-run")
    try:
        screen._process.wait(60.0)
        with pytest.raises(ActorFailed, match="asyncrl-top"):
            screen.drawing()
    finally:
        screen.close()


def test_what_comes_to_a_terminal_is_timed_however_busy_its_owner_is():
    ours, theirs = pty.openpty()
    terminal = Terminal(ours)
    try:
        os.write(theirs, b"ready?")
        deadline = time.monotonic() + 60.0
        while not terminal.read():
            assert time.monotonic() < deadline
        os.write(theirs, b"picture")
        written = time.monotonic()
        # No other thread runs meanwhile.
        sum(range(100_000_000))
        busy_until = time.monotonic()
        (at,) = terminal.read()
        assert at - written < busy_until - at
    finally:
        os.close(theirs)
        terminal.close()


@pytest.mark.parametrize(("cpus", "rollouters", "each"), [(2, 256, 32), (2, 8, 1), (64, 256, 1), (1, 257, 65)])
def test_no_more_processes_than_the_processors_bear(monkeypatch, cpus, rollouters, each):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert per_process(rollouters) == each
    assert -(-rollouters // each) <= PROCESSES_PER_CPU * cpus


def test_what_is_on_other_hosts_has_the_least_share_of_the_processors(tmp_path):
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this Linux does not share processors among sessions")
    said = "import os, pathlib; print(os.sched_getscheduler(0), pathlib.Path('/proc/self/autogroup').read_text())"
    yielding = f"from tools.bench.scale_host import yield_processors; yield_processors(); {said}"
    processes = Processes(RunFolder(path=tmp_path, run_id="run"))
    processes.folder.logs.mkdir(parents=True)
    processes.start("ours", ["-c", said])
    processes.start("theirs", ["-c", yielding], session=True)
    processes.close(60.0)
    processes.check()
    ours, theirs = ((processes.folder.logs / f"{name}.log").read_text().split() for name in ("ours", "theirs"))
    assert ours == [str(os.sched_getscheduler(0)), *Path("/proc/self/autogroup").read_text().split()]
    # Ours may have none, which Linux shows as an empty file: it is begun with a session.
    scheduler, group, *nice = theirs
    assert scheduler == str(os.SCHED_IDLE) and group not in ours and nice == ["nice", "19"]

"""What the scale benchmark makes of snapshots, and of a screen that nobody sees."""

import os
import pty
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import ActorFailed, BroadcastFailed
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.messages.weights import Collective, CollectiveGroup
from asyncrl.snapshot import ActorView, Histogram, RunView, Snapshot
from asyncrl.telemetry.catalogue import EDGES
from asyncrl.weights.broadcast import BroadcastPart
from tools.bench import scale_collective
from tools.bench.report import Report
from tools.bench.scale_heart import Heart
from tools.bench.scale_phases import RECOVERY_S, broken, frozen, steady
from tools.bench.scale_report import CONTROL_PLANE, LAG, LAG_TARGET_S, lost, report_all, report_phase
from tools.bench.scale_run import (
    MOST_IN_FLIGHT,
    PROCESSES_PER_CPU,
    READY_S,
    Processes,
    concurrency,
    config,
    per_process,
)
from tools.bench.scale_terminal import Terminal
from tools.bench.scale_top import Drawing, Top, drawing
from tools.bench.scale_watch import FULL_S, SAY_S, Follower, Seen, Watched

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


def test_nothing_is_lost_when_every_granted_group_is_accounted_for():
    assert lost(snapshot(0.0), snapshot(9.0)) == {}


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


def test_what_went_wrong_before_a_phase_is_not_of_it():
    faults = {"wire/unsent": 2.0}
    assert lost(snapshot(0.0, faults=faults), snapshot(9.0, faults=faults)) == {}


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


@pytest.mark.parametrize(("rollouters", "each"), [(1, 64), (64, 64), (256, 64), (512, 32), (1024, 16), (4096, 8)])
def test_many_rollouters_have_no_more_in_flight_than_some(tmp_path, rollouters, each):
    assert concurrency(rollouters) == each
    assert (
        rollouters * each <= MOST_IN_FLIGHT
        or each == config(tmp_path, rollouters, broadcast=False).rollout.samples_per_prompt
    )


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


def test_it_is_said_how_far_a_start_is_and_at_which_times():
    watching = Watching([steady(1)])
    for tenth in range(1, 131):
        watching.see(tenth / 10, **STARTING)
    assert len(watching.said) == int(13.0 / SAY_S)
    assert "4 of 6 actors ready; not ready: rollouter/0, rollouter/1" in watching.said[0]


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


def test_the_stand_in_of_a_broadcast_breaks_once_for_all_and_then_brings_them_all(tmp_path):
    folder = tmp_path / scale_collective.FOLDER
    folder.mkdir()
    groups = [
        CollectiveGroup(backend="gloo", epoch=epoch, world_size=3, host="h", port=1, token="") for epoch in (1, 2)
    ]
    broadcasts = [
        BroadcastPart(7, Collective(group=group, first_rank=1, buckets=[]), timeout_s=5.0) for group in groups
    ]
    sender = scale_collective.Sender(folder)
    members = [scale_collective.Receiver(folder) for _ in range(2)]
    scale_collective.break_next(tmp_path)
    for group, broadcast, breaks in zip(groups, broadcasts, (True, False), strict=True):
        with ThreadPoolExecutor() as threads:
            received = [threads.submit(member.receive, broadcast, 0) for member in members]
            if breaks:
                with pytest.raises(BroadcastFailed, match="a connection broke"):
                    sender.send(group, 7, [], iter([]))
            else:
                sender.send(group, 7, [], iter([]))
            for each in received:
                if breaks:
                    with pytest.raises(BroadcastFailed, match="a connection broke"):
                        each.result()
                else:
                    assert each.result() == []


def test_a_member_waits_for_the_sender_no_longer_than_it_may(tmp_path):
    group = CollectiveGroup(backend="gloo", epoch=1, world_size=2, host="h", port=1, token="")
    broadcast = BroadcastPart(7, Collective(group=group, first_rank=1, buckets=[]), timeout_s=0.05)
    with pytest.raises(BroadcastFailed, match="without a word of the sender"):
        scale_collective.Receiver(tmp_path).receive(broadcast, 0)


class Beats:
    """Heartbeats that note what becomes of them, and in which thread."""

    def __init__(self):
        self.done, self.threads, self.closed = [], set(), threading.Event()

    def _note(self, what):
        self.done.append(what)
        self.threads.add(threading.get_ident())

    def open(self):
        self._note("open")

    def beat(self):
        self._note("beat")

    def close(self):
        self._note("close")
        self.closed.set()


def test_one_thread_beats_for_all_actors_of_a_process_until_each_ends():
    heart, actors = Heart(0.01), [Beats() for _ in range(3)]
    for beats in actors:
        heart.add(beats)
    deadline = time.monotonic() + 60.0
    while not all(len(beats.done) > 3 for beats in actors):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    heart.remove(actors[0])
    assert actors[0].closed.wait(60.0)
    ended = len(actors[0].done)
    going_on = len(actors[1].done)
    while len(actors[1].done) < going_on + 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    heart.stop()
    assert len(actors[0].done) == ended
    for beats in actors:
        assert beats.done[0] == "open" and beats.done[-1] == "close" and set(beats.done[1:-1]) == {"beat"}
    assert len(set.union(*(beats.threads for beats in actors))) == 1

"""Snapshots of a run from the controller: who gets them, how often, and whether they add up."""

import asyncio
import math
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from controller.test_controller_actor import CONFIG, is_parked, on_cluster, run
from harness import until
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from recordings import read_recording

from asyncrl.config.load import validate_config
from asyncrl.controller import actor as actor_module
from asyncrl.controller.observation import observation as observation_module
from asyncrl.controller.observation import snapshots as snapshots_module
from asyncrl.controller.observation.recent_lines import MOST_EVALS, RecentMetrics
from asyncrl.controller.observation.snapshots import SNAPSHOT_S, Given, Snapshots
from asyncrl.messages.actors import ActorEnded, StopRun, WatchRun
from asyncrl.messages.monitor import UPDATE_LINES, Event, Heartbeat, MetricsLine, WatchSnapshot, decode_snapshot
from asyncrl.observe.recording import Recorder
from asyncrl.rpc import actor as runtime_actor
from asyncrl.rpc.wire.keys import VIEWER


async def look(viewer, seen=-1):
    taken = await viewer.call(WatchSnapshot(seen=seen))
    return taken.number, decode_snapshot(taken.snapshot)


async def seen_by(viewer, condition):
    number = -1
    while True:
        number, snapshot = await look(viewer, number)
        if condition(snapshot):
            return snapshot


def of(snapshot, name):
    return next(actor for actor in snapshot.actors if actor.name == name)


def event(number, wall, level, text):
    return Event(number=number, wall=wall, level=level, text=text)


def beat(number=1, **facts):
    return Heartbeat(beat=number, state=facts.pop("state", "ready"), **facts)


async def cast(peer, message):
    await until(lambda: peer.cast(message))


@on_cluster()
async def test_a_snapshot_has_every_actor_of_the_run_dead_or_alive(cluster):
    viewer = cluster.caller(VIEWER)
    _, first = await look(viewer)
    assert [actor.name for actor in first.actors] == sorted(CONFIG.actors)
    assert {actor.condition for actor in first.actors} == {"ready", "absent"}
    assert (first.run.phase, first.run.version, first.run.attempt) == ("starting", -1, 0)
    await cluster.register("reward/0", address="")
    await cluster.register("dataloader/0", attempt=2)
    await cluster.register("rollouter/0")
    ended = ActorEnded(name="rollouter/0", incarnation=1, exit_code=-9, fatal=False, reason="killed by SIGKILL")
    await cluster.caller().call(ended)
    seen = await seen_by(viewer, lambda s: of(s, "rollouter/0").condition == "dead")
    assert of(seen, "reward/0").condition == "starting"
    assert (of(seen, "dataloader/0").condition, of(seen, "dataloader/0").restarts) == ("ready", 2)
    assert ("warning", "rollouter/0", "ended: killed by SIGKILL") in [
        (event.level, event.actor, event.text) for event in seen.events
    ]


NONSENSE = [
    beat(2, state_s=math.nan, cpu=math.nan),
    *(beat(2, counters={"learner/step": number}) for number in (math.nan, math.inf, -1e300)),
    *(MetricsLine(line={"kind": "train", "step": step}) for step in ("three", math.nan, 1 << 63, -1, True)),
    MetricsLine(line={"kind": "train", "step": 5, "start": "late"}),
    MetricsLine(line={"kind": "train"}),
    MetricsLine(line={"kind": "train", "step": 5, "long": "x" * (1 << 19)}),
    MetricsLine(line={"kind": ["train"], "step": None}),
]


@on_cluster()
async def test_the_controller_survives_anything_that_the_learner_reports(cluster):
    viewer, learner = cluster.caller(VIEWER), cluster.caller("learner/0")
    await cluster.register("learner/0")
    await cast(learner, beat(1, counters={"learner/step": 2.0}))
    counters = cluster.controller.counters
    for number, said in enumerate(NONSENSE, 2):
        await cast(learner, replace(said, beat=number) if isinstance(said, Heartbeat) else said)
    # The first one lacks two numbers.
    kinds = ("lines/refused", "heartbeats/left_out")
    await until(lambda: sum(counters.get(kind, 0) for kind in kinds) == len(NONSENSE) + 1)
    await cast(learner, MetricsLine(line={"kind": "train", "step": 4}))
    seen = await seen_by(viewer, lambda s: s.train)
    assert (seen.run.step, [line["step"] for line in seen.train]) == (4, [4])
    assert not cluster.main.done()


@on_cluster(validate_config(CONFIG.model_dump() | {"monitor": {"record_s": 0.05}}))
async def test_a_snapshot_that_cannot_be_built_does_not_end_the_controller(cluster, monkeypatch):
    asked = []

    async def fail(_snapshots):
        asked.append("once more")
        raise ValueError("an unexpected error")

    viewer = cluster.caller(VIEWER)
    monkeypatch.setattr(Snapshots, "build", fail)
    await viewer.call(WatchSnapshot(seen=-1), timeout=3.0)
    await until(lambda: len(asked) >= 4)
    assert cluster.controller.counters["snapshots/failed"] >= 3
    monkeypatch.undo()
    assert (await seen_by(viewer, lambda s: True)).run.phase == "starting"
    assert not cluster.main.done()


def test_a_run_keeps_no_more_names_of_evaluations_than_it_has():
    lines = RecentMetrics()
    for number in range(10_000):
        lines.add({"kind": "eval", f"eval/{number}/mean": 1.0})
        lines.add({"kind": "eval", "eval/0/mean": float(number)})
    assert len(lines.evals) == MOST_EVALS and lines.evals["0"]["eval/0/mean"] == 9999.0


@pytest.mark.parametrize("wall", [math.nan, 1e18])
@on_cluster()
async def test_a_repeated_event_counts_once_and_one_without_a_time_has_its_arrival_time(cluster, wall):
    viewer, actor = cluster.caller(VIEWER), cluster.caller("reward/0")
    await cluster.register("reward/0")
    first, second = event(1, 5.0, "error", "event 1"), event(2, wall, "warning", "event 2")
    await cast(actor, beat(1, events=[first]))
    await cast(actor, beat(2, events=[first, second]))
    seen = await seen_by(viewer, lambda s: any(event.text == "event 2" for event in s.events))
    notices = [event for event in seen.events if event.actor == "reward/0"]
    assert [(event.text, event.level) for event in notices] == [("event 1", "error"), ("event 2", "warning")]
    assert notices[0].wall == 5.0 and seen.wall - 60 < notices[1].wall <= seen.wall
    assert [event.number for event in seen.events] == sorted({event.number for event in seen.events})


@on_cluster()
async def test_lost_log_lines_are_counted_over_all_incarnations_of_all_actors(cluster, monkeypatch):
    """A heartbeat holds only what has changed, and a restarted actor counts from 0."""
    notices = []
    monkeypatch.setattr(
        runtime_actor.Actor, "notify", lambda _, key, text, *, count, **more: notices.append((key, count))
    )
    monkeypatch.setattr(runtime_actor, "lost_lines", lambda: 5)
    await until(lambda: notices == [("logs", 5)])
    for name, incarnation, lost, all_lost in (
        ("rollouter/0", 1, 50, 55),
        ("reward/0", 1, 40, 95),
        ("rollouter/0", 2, 45, 140),
    ):
        await cluster.register(name, incarnation)
        await cast(cluster.caller(name, incarnation), beat(counters={"logs/lost": lost}))
        await until(lambda all_lost=all_lost: notices[-1] == ("logs", all_lost))
        await cast(cluster.caller(name, incarnation), beat(2))
    assert notices == [("logs", 5), ("logs", 55), ("logs", 95), ("logs", 140)]


@on_cluster(validate_config(CONFIG.model_dump() | {"monitor": {"record_s": 3600.0}}))
async def test_a_viewer_waits_for_the_next_snapshot_and_gets_each_once(cluster):
    viewers = [cluster.caller(VIEWER) for _ in range(3)]
    numbers = await asyncio.gather(*(look(viewer) for viewer in viewers))
    number = numbers[0][0]
    assert {one for one, _ in numbers} == {number}
    call = viewers[0].call(WatchSnapshot(seen=number))
    assert await is_parked(call)
    later, _ = await look(viewers[1], number)
    assert (await call).number == later
    # And the next number cannot be guessed.
    third, _ = await look(viewers[0], later)
    assert 0 < later - number != third - later > 0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(-1, 10)), max_size=200))
def test_a_viewer_that_does_not_confirm_its_reads_gets_less_each_time(questions):
    """A viewer may ask anything, at any time, as often as it likes."""
    given, now, number = Given(), 0.0, 1 << 60
    for pause_s, lie in questions:
        now += pause_s
        given.heard(lie)
        if given.may_have_more(now):
            number += 1 << 10
            given.give(number, now)
            assert not given.may_have_more(now + 0.99 * SNAPSHOT_S)
        assert len(given.unread) <= 2 + math.log2(max(1.0, now / SNAPSHOT_S))


def test_a_reading_viewer_does_not_wait_even_after_lost_snapshots():
    given = Given()
    for number in range(1, 6):
        given.give(number, 0.0)
    given.heard(2)
    assert given.unread == [3, 4, 5]
    given.heard(5)
    assert given.unread == [] and given.may_have_more(0.0)


@on_cluster()
async def test_the_last_snapshot_reaches_every_viewer_once(cluster, monkeypatch):
    monkeypatch.setattr(snapshots_module, "SNAPSHOT_S", 1e6)
    monkeypatch.setattr(actor_module, "FAREWELL_S", 20.0)
    viewer = cluster.caller(VIEWER)
    await look(viewer)
    # A viewer that got nothing does not count as having seen something.
    taken = await viewer.call(WatchSnapshot(seen=-1), timeout=3.0)
    assert (taken.number, taken.snapshot) == (-1, b"")
    asked = viewer.call(WatchSnapshot(seen=-1))
    assert await is_parked(asked)
    await cluster.caller().call(StopRun(reason="enough"))
    assert decode_snapshot((await asked).snapshot).run.reason == "enough"
    assert (await viewer.call(WatchSnapshot(seen=-1), timeout=3.0)).snapshot == b""


@on_cluster()
async def test_lines_are_kept_by_kind_and_viewers_of_steps_get_no_updates(cluster):
    viewer, learner = cluster.caller(VIEWER), cluster.caller("learner/0")
    await cluster.register("learner/0")
    for number in range(UPDATE_LINES + 5):
        await cast(learner, MetricsLine(line={"kind": "update", "replica": f"rollouter/{number}"}))
    for mean in (0.1, 0.2):
        await cast(learner, MetricsLine(line={"kind": "eval", "eval/held/mean": mean}))
    await cast(learner, MetricsLine(line={"kind": "eval", "eval/other/mean": 0.5}))
    await cast(learner, MetricsLine(line={"kind": "train", "step": 3}))
    seen = await seen_by(viewer, lambda s: s.train)
    assert len(seen.updates) == UPDATE_LINES and seen.updates[-1]["replica"] == f"rollouter/{UPDATE_LINES + 4}"
    assert [line.get("eval/held/mean", line.get("eval/other/mean")) for line in seen.evals] == [0.2, 0.5]
    assert seen.run.step == 3
    assert {line["kind"] for line in (await cluster.caller().call(WatchRun(seen_line=0))).lines} == {"eval", "train"}


@on_cluster(validate_config(CONFIG.model_dump() | {"monitor": {"record_s": 0.05}}))
async def test_the_end_of_a_run_is_recorded_even_if_it_exceeds_a_record_interval(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(actor_module, "FAREWELL_S", 0.3)
    await cluster.all_ready()
    viewer = cluster.caller(VIEWER)
    await cluster.caller().call(StopRun(reason="enough"))
    seen = await seen_by(viewer, lambda s: s.run.phase == "done")
    assert seen.run.reason == "enough"
    phases = [event.text for event in seen.events if event.text.startswith("the run is")]
    assert phases == ["the run is running", "the run is draining: enough", "the run is stopped: enough"]
    # Raises the error that ended it, if there was one.
    await asyncio.wait_for(asyncio.shield(cluster.main), 10)
    kept = read_recording(tmp_path)
    assert kept[-1].run.phase == "done"
    assert [actor.name for actor in kept[-1].actors] == sorted(CONFIG.actors)


def test_without_a_viewer_no_snapshot_is_built(tmp_path, monkeypatch):
    taken, build = [], Snapshots.build
    monkeypatch.setattr(Snapshots, "build", lambda snapshots: taken.append(snapshots) or build(snapshots))

    async def scenario(cluster):
        await asyncio.wait({cluster.main}, timeout=0.1)
        assert not taken
        # Viewers get them, and the end.
        viewer = cluster.caller(VIEWER)
        number, _ = await look(viewer)
        await look(viewer, number)
        assert taken
        await cluster.caller().call(StopRun(reason="enough"))
        assert (await seen_by(viewer, lambda s: s.run.phase == "done")).run.reason == "enough"

    unrecorded = {"monitor": {"record_bytes": 0, "record_s": 0.01}}
    run(tmp_path, scenario, validate_config(CONFIG.model_dump() | unrecorded))


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
@on_cluster()
async def test_setting_the_clock_changes_no_age(cluster, monkeypatch, by_s):
    clock = cluster.controller.clock
    number, before = await look(viewer := cluster.caller(VIEWER))
    monkeypatch.setattr(clock, "wall", lambda: time.time() + by_s)
    _, after = await look(viewer, number)
    assert abs(after.wall - before.wall - by_s) < 1800
    assert before.run.age_s < after.run.age_s < 1800


def test_the_free_space_of_a_hung_disk_is_unknown_and_a_full_disk_has_none(tmp_path, monkeypatch):
    answers = threading.Event()

    def statvfs(_path):
        if not answers.is_set():
            raise OSError("late")
        return SimpleNamespace(f_bavail=0, f_frsize=4096)

    monkeypatch.setattr(observation_module, "DISK_S", 0.01)
    monkeypatch.setattr(os, "statvfs", statvfs)

    async def scenario(cluster):
        viewer = cluster.caller(VIEWER)
        number, first = await look(viewer)
        _, second = await look(viewer, number)
        assert first.run.disk_free_bytes is second.run.disk_free_bytes is None
        answers.set()
        await seen_by(viewer, lambda s: s.run.disk_free_bytes == 0)

    run(tmp_path, scenario)


def test_a_hung_file_system_does_not_delay_the_end(tmp_path, monkeypatch):
    """Its thread is abandoned: neither the event loop nor its executor waits."""
    asked, answers, happened = threading.Event(), threading.Event(), []

    def statvfs(_path):
        asked.set()
        answers.wait(60)
        happened.append("it answers")
        raise OSError("late")

    monkeypatch.setattr(os, "statvfs", statvfs)

    async def scenario(cluster):
        await cluster.all_ready()
        await until(asked.is_set)
        await cluster.caller().call(StopRun(reason="enough"))
        await asyncio.shield(cluster.main)

    try:
        run(tmp_path, scenario)
        happened.append("the end")
    finally:
        answers.set()
    assert happened[0] == "the end"


def test_steps_that_a_learner_trains_again_leave_nothing():
    """Neither their lines nor the updates and evaluations that were reported with them."""
    lines = RecentMetrics()
    for start, step, evaluation in ((1, 4, "kept"), (1, 5, "again"), (1, 6, "undone"), (2, 5, "again")):
        about = {"start": start, "step": step}
        lines.add({"kind": "update", "replica": "rollouter/0"} | about)
        lines.add({"kind": "train"} | about)
        lines.add({"kind": "eval", f"eval/{evaluation}/mean": 0.5} | about)
    for held in (lines.train, lines.updates):
        assert [(line["start"], line["step"]) for line in held] == [(1, 4), (2, 5)]
    assert {name: line["start"] for name, line in lines.evals.items()} == {"kept": 1, "again": 2}


@on_cluster()
async def test_a_learner_resumed_from_its_checkpoint_is_shown_at_the_step_it_reports(cluster):
    async def report_step(incarnation, step, shown, line=None):
        learner = cluster.caller("learner/0", incarnation)
        await cast(learner, beat(step, counters={"learner/step": float(step)}))
        if line is not None:
            await cast(learner, MetricsLine(line={"kind": "train", "step": line, "start": incarnation}))
        await seen_by(cluster.caller(VIEWER), lambda s: s.run.step == shown)

    await cluster.register("learner/0", 1)
    await report_step(1, 7, shown=7)
    # A line comes before the heartbeat that mentions it.
    await report_step(1, 8, shown=9, line=9)
    await cluster.register("learner/0", 2)
    # Until the learner knows its step, only the newest line is available.
    await cast(cluster.caller("learner/0", 2), beat(1))
    seen = await seen_by(cluster.caller(VIEWER), lambda s: of(s, "learner/0").incarnation == 2)
    assert seen.run.step == 9
    await report_step(2, 4, shown=4)
    await report_step(2, 5, shown=6, line=6)


RECORDED = {"record_s": 0.02}


async def recorded(run_dir, condition):
    """Wait for several such snapshots, so that the newest may be lost."""
    await until(lambda: sum(bool(condition(snapshot)) for snapshot in read_recording(run_dir)) >= 3)


def texts(snapshot):
    return [(event.actor, event.text) for event in snapshot.events]


@pytest.mark.parametrize("damage", ["torn", "unreadable"])
@on_cluster(validate_config(CONFIG.model_dump() | {"monitor": RECORDED}))
async def test_a_successor_keeps_earlier_events_and_reports_itself_as_successor(cluster, tmp_path, damage):
    learner, actor = cluster.caller("learner/0"), cluster.caller("reward/0")
    for name in ("learner/0", "reward/0"):
        await cluster.register(name, attempt=2)
    await cast(actor, beat(1, events=[event(1, 5.0, "error", "first"), event(2, 6.0, "error", "last")]))
    for step in (1, 2):
        await cast(learner, MetricsLine(line={"kind": "train", "step": step, "start": 1, "reward/mean": step / 4}))
    await cast(learner, MetricsLine(line={"kind": "update", "replica": "rollouter/0"}))
    await cast(learner, MetricsLine(line={"kind": "eval", "eval/held/mean": 0.5}))
    await recorded(tmp_path, lambda s: s.evals and ("reward/0", "last") in texts(s))
    await cluster.die()
    newest = sorted((tmp_path / "monitor").iterdir())[-1]
    if damage == "torn":
        newest.write_bytes(newest.read_bytes()[:-3])
    else:
        newest.write_bytes(b"\xc1" + newest.read_bytes())
    await cluster.start(9)
    viewer, actor, learner = cluster.caller(VIEWER), cluster.caller("reward/0"), cluster.caller("learner/0")
    await cluster.register("reward/0", attempt=2)
    # It cannot know which viewers have its predecessor's last event.
    again, new = event(2, 6.0, "error", "last"), event(3, 7.0, "error", "new")
    await cast(actor, beat(2, events=[again, new]))
    await cast(learner, MetricsLine(line={"kind": "train", "step": 3, "start": 1}))
    seen = await seen_by(viewer, lambda s: ("reward/0", "new") in texts(s) and any(x["step"] == 3 for x in s.train))
    own = ("controller/0", "was restarted: the previous controller died")
    assert of(seen, "controller/0").restarts == 1 and of(seen, "reward/0").restarts == 2
    if damage == "unreadable":
        assert texts(seen).count(own) == 1 and [line["step"] for line in seen.train] == [3]
        return
    notices = [text for text in texts(seen) if text[0] in ("reward/0", "controller/0")]
    assert notices == [("reward/0", "first"), ("reward/0", "last"), own, ("reward/0", "new")]
    assert [event.number for event in seen.events] == sorted({event.number for event in seen.events})
    assert [(line["step"], line.get("reward/mean")) for line in seen.train] == [(1, 0.25), (2, 0.5), (3, None)]
    assert (len(seen.updates), len(seen.evals)) == (1, 1)
    # And it is recorded for later readers.
    await recorded(tmp_path, lambda s: own in texts(s) and ("reward/0", "first") in texts(s))
    await cluster.die()
    await cluster.start(11)
    seen = await seen_by(cluster.caller(VIEWER), lambda s: texts(s).count(own) == 2)
    assert of(seen, "controller/0").restarts == 2 and ("reward/0", "first") in texts(seen)


@on_cluster(validate_config(CONFIG.model_dump() | {"monitor": RECORDED}))
async def test_a_successor_takes_nothing_from_another_run(cluster, tmp_path):
    await cluster.register("reward/0")
    await cast(cluster.caller("reward/0"), beat(1, events=[event(1, 5.0, "warning", "something")]))
    await recorded(tmp_path, lambda s: ("reward/0", "something") in texts(s))
    await cluster.die()
    [*_, last] = read_recording(tmp_path)
    for path in (tmp_path / "monitor").iterdir():
        path.unlink()
    another = msgspec.structs.replace(last, run=msgspec.structs.replace(last.run, run_id="another"))
    Recorder(tmp_path, last.run.attempt, 1 << 20).record(last.wall, msgspec.msgpack.encode(another))
    await cluster.start(9)
    _, seen = await look(cluster.caller(VIEWER))
    assert ("reward/0", "something") not in texts(seen) and seen.events

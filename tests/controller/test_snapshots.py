"""What the controller shows of a run: to whom, how often, and whether it adds up."""

import asyncio

import pytest
from test_controller_actor import CONFIG, is_parked, run

from asyncrl.controller.snapshots import SNAPSHOT_S
from asyncrl.messages import (
    ActorEnded,
    EventRecord,
    Heartbeat,
    MetricsLine,
    ResourceRecord,
    StopRun,
    WatchSnapshot,
)
from asyncrl.monitor.client import decode_snapshot
from asyncrl.monitor.recording import read_recording
from asyncrl.snapshot import UPDATE_LINES, Histogram
from asyncrl.wire.keys import VIEWER


async def look(viewer, seen=-1):
    taken = await viewer.call(WatchSnapshot(seen=seen))
    return taken.number, decode_snapshot(taken.snapshot)


async def until(viewer, condition):
    number = -1
    while True:
        number, snapshot = await look(viewer, number)
        if condition(snapshot):
            return snapshot


def of(snapshot, name):
    return next(actor for actor in snapshot.actors if actor.name == name)


def beat(number=1, **facts):
    return Heartbeat(beat=number, progress=number, state=facts.pop("state", "ready"), **facts)


async def cast(peer, message):
    while not peer.cast(message):
        await asyncio.sleep(0.005)


def test_every_actor_of_the_run_is_there_whatever_became_of_it(tmp_path):
    async def scenario(cluster):
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
        seen = await until(viewer, lambda s: of(s, "rollouter/0").condition == "dead")
        assert of(seen, "reward/0").condition == "starting"
        assert (of(seen, "dataloader/0").condition, of(seen, "dataloader/0").restarts) == ("ready", 2)
        assert ("warning", "rollouter/0", "ended: killed by SIGKILL") in [
            (event.level, event.actor, event.text) for event in seen.events
        ]

    run(tmp_path, scenario)


def test_what_is_not_said_again_stays_as_it_was(tmp_path):
    async def scenario(cluster):
        viewer, actor = cluster.caller(VIEWER), cluster.caller("reward/0")
        await cluster.register("reward/0")
        worker = ResourceRecord("worker/0", "idle", "", 2.0, {"idle": 3.0, "scoring": 1.0})
        facts = {"counters": {"reward/scored": 4.0}, "histograms": {"reward/run_s": Histogram([1], 0.5)}}
        await cast(actor, beat(1, resources=[worker], **facts))
        await cast(actor, beat(2, counters={"reward/failed": 1.0}, cpu=0.25, rss_bytes=99))
        seen = await until(viewer, lambda s: "reward/failed" in of(s, "reward/0").figures)
        there = of(seen, "reward/0")
        assert there.figures == {"reward/scored": 4.0, "reward/failed": 1.0}
        assert there.histograms == {"reward/run_s": Histogram([1], 0.5)}
        assert (there.cpu, there.rss_bytes) == (0.25, 99)
        (resource,) = there.resources
        # Its time goes on though it says nothing.
        assert resource.state_s > 2.0
        assert sum(resource.seconds.values()) == pytest.approx(4.0 + resource.state_s - 2.0)
        # Another incarnation begins anew.
        await cluster.register("reward/0", incarnation=2)
        seen = await until(viewer, lambda s: of(s, "reward/0").incarnation == 2)
        assert of(seen, "reward/0").figures == {} and of(seen, "reward/0").resources == []

    run(tmp_path, scenario)


def test_an_event_that_is_told_twice_is_one(tmp_path):
    async def scenario(cluster):
        viewer, actor = cluster.caller(VIEWER), cluster.caller("reward/0")
        await cluster.register("reward/0")
        first, second = (EventRecord(number, 5.0, "error", f"event {number}") for number in (1, 2))
        await cast(actor, beat(1, events=[first]))
        await cast(actor, beat(2, events=[first, second]))
        seen = await until(viewer, lambda s: any(event.text == "event 2" for event in s.events))
        told = [event for event in seen.events if event.actor == "reward/0"]
        assert [(event.text, event.wall, event.level) for event in told] == [
            ("event 1", 5.0, "error"),
            ("event 2", 5.0, "error"),
        ]
        assert [event.number for event in seen.events] == sorted({event.number for event in seen.events})

    run(tmp_path, scenario)


def test_a_viewer_waits_for_another_snapshot_and_gets_each_once(tmp_path):
    async def scenario(cluster):
        viewers = [cluster.caller(VIEWER) for _ in range(3)]
        numbers = await asyncio.gather(*(look(viewer) for viewer in viewers))
        number = numbers[0][0]
        assert {one for one, _ in numbers} == {number}
        call = viewers[0].call(WatchSnapshot(seen=number))
        assert await is_parked(call)
        loop = asyncio.get_running_loop()
        began = loop.time()
        later, _ = await look(viewers[1], number)
        assert later > number and loop.time() - began < 4 * SNAPSHOT_S
        assert (await call).number == later

    run(tmp_path, scenario)


def test_lines_are_kept_by_kind_and_updates_do_not_reach_who_follows_the_steps(tmp_path):
    async def scenario(cluster):
        viewer, learner = cluster.caller(VIEWER), cluster.caller("learner/0")
        await cluster.register("learner/0")
        for number in range(UPDATE_LINES + 5):
            await cast(learner, MetricsLine(line={"kind": "update", "replica": f"rollouter/{number}"}))
        for mean in (0.1, 0.2):
            await cast(learner, MetricsLine(line={"kind": "eval", "eval/held/mean": mean}))
        await cast(learner, MetricsLine(line={"kind": "eval", "eval/other/mean": 0.5}))
        await cast(learner, MetricsLine(line={"kind": "train", "step": 3}))
        seen = await until(viewer, lambda s: s.train)
        assert len(seen.updates) == UPDATE_LINES and seen.updates[-1]["replica"] == f"rollouter/{UPDATE_LINES + 4}"
        assert [line.get("eval/held/mean", line.get("eval/other/mean")) for line in seen.evals] == [0.2, 0.5]
        assert seen.run.step == 3
        assert {line["kind"] for line in cluster.controller._state(0).lines} == {"eval", "train"}

    run(tmp_path, scenario)


def test_the_end_is_seen_and_recorded(tmp_path):
    async def scenario(cluster):
        await cluster.all_ready()
        viewer = cluster.caller(VIEWER)
        await cluster.caller().call(StopRun(reason="enough"))
        seen = await until(viewer, lambda s: s.run.phase == "done")
        assert seen.run.reason == "enough"
        phases = [event.text for event in seen.events if event.text.startswith("the run is")]
        assert phases == ["the run is running", "the run is draining: enough", "the run is done: enough"]
        await asyncio.wait_for(asyncio.shield(cluster.main), 10)
        kept = list(read_recording(tmp_path))
        assert kept[-1].run.phase == "done"
        assert [actor.name for actor in kept[-1].actors] == sorted(CONFIG.actors)

    run(tmp_path, scenario)


def test_a_successor_goes_on_where_the_recording_ended(tmp_path):
    async def scenario(cluster):
        _, before = await look(cluster.caller(VIEWER))
        await cluster.die()
        await cluster.start(9)
        number, after = await look(cluster.caller(VIEWER))
        assert number > 9 - 1
        assert after.run.age_s > before.run.age_s

    run(tmp_path, scenario)

"""A whole run as it is watched and recorded: nothing is missing, and the times of all states add up."""

import asyncio
import os
import signal

import pytest
from launcher.launched import sim_run, wait_until
from ledgers import assert_ledgers_add_up
from recordings import read_recording

from asyncrl.snapshot import Snapshot
from asyncrl.top.source.client import find_target, watch

STEPS = 80
"""Enough for a rollouter to die, to come up again and to be recorded."""


def is_recorded(run, name):
    """Whether a snapshot in which this actor's engine is at work is in the recording."""
    actors = [actor for snapshot in read_recording(run.run_dir) for actor in snapshot.actors if actor.name == name]
    return any(actor.condition == "ready" and actor.resources for actor in actors)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(run, snapshots seen, snapshots recorded) of a run in which a rollouter was killed."""
    run = sim_run(tmp_path_factory.mktemp("watched"), "--learner.steps", str(STEPS))
    seen = []

    async def look():
        killed = False
        async for news in watch(find_target(str(run.run_dir))):
            seen.append(news)
            if not killed and await asyncio.to_thread(is_recorded, run, "rollouter/1"):
                os.kill(run.actor("rollouter/1"), signal.SIGKILL)
                killed = True

    try:
        wait_until(lambda: (run.run_dir / "private" / "controller.json").exists(), "the controller")
        asyncio.run(asyncio.wait_for(look(), 120))
        code, shown = run.end()
        assert code == 0, shown
    finally:
        run.close()
    return run, [one for one in seen if isinstance(one, Snapshot)], read_recording(run.run_dir)


def test_the_ledgers_of_all_serial_resources_add_up(watched):
    run, seen, recorded = watched
    for snapshots in (seen, recorded):
        states = assert_ledgers_add_up(snapshots, run.run_dir)
        assert {name for name, _ in states} == {
            "learner/0 rank",
            "reward/0 worker/0",
            "rollouter/0 engine",
            "rollouter/1 engine",
        }
        assert len([name for name, _ in states if name == "rollouter/1 engine"]) == 2
    of = {name: found for (name, _), found in states.items()}
    assert {"starting", "waiting", "training", "publishing", "checkpointing"} <= of["learner/0 rank"]
    assert {"starting", "waiting", "generating", "paused", "loading"} <= of["rollouter/0 engine"]


def test_it_is_seen_from_the_start_to_the_end(watched):
    _, seen, recorded = watched
    assert [snapshot.run.phase for snapshot in (seen[0], seen[-1])] == ["starting", "done"]
    assert recorded[-1].run == seen[-1].run
    assert seen[-1].run.step == STEPS
    assert {line["step"] for snapshot in seen for line in snapshot.train} == set(range(1, STEPS + 1))
    assert {line["replica"] for line in seen[-1].updates} == {"rollouter/0", "rollouter/1"}
    walls = [snapshot.wall for snapshot in recorded]
    assert walls == sorted(walls)


def test_each_actor_tells_of_itself(watched):
    _, seen, _ = watched
    end = [snapshot for snapshot in seen if snapshot.run.phase == "running"][-1]
    for actor in end.actors:
        assert actor.condition == "ready", actor.name
        assert actor.rss_bytes > 1 << 20 and actor.pid
        assert sum(actor.histograms["loop/lag_s"].counts) > 0
        assert 0.0 < actor.loop_busy <= 1.0 and actor.cpu >= 0.0
    by_name = {actor.name: actor for actor in end.actors}
    assert by_name["rollouter/1"].restarts == 1
    figures = {name: actor.figures for name, actor in by_name.items()}
    for name, wanted in {
        "rollouter/0": "rollout/sampled_tokens rollout/in_flight rollout/oldest_s rollout/kv_use rollout/held",
        "reward/0": "reward/scored reward/queued reward/running",
        "learner/0": "learner/step buffer/groups ledger/trained learner/tokens",
        "dataloader/0": "tickets/outstanding tickets/gate tickets/oldest_s staleness/limit",
        "parameter_server/0": "weights/replicas weights/replicas_behind weights/updates_committed",
    }.items():
        assert not set(wanted.split()) - figures[name].keys(), name
    gate = figures["dataloader/0"]
    assert 0 <= gate["tickets/outstanding"] <= gate["tickets/gate"] + end.run.groups_per_step
    for name, wanted in {
        "rollouter/0": "rollout/response_tokens rollout/generate_s rollout/reward_s rollout/deliver_s",
        "reward/0": "reward/score_s reward/run_s",
        "learner/0": "staleness/tokens staleness/groups groups/age_s calls/round_trip_s",
        "dataloader/0": "tickets/age_s",
    }.items():
        assert not set(wanted.split()) - by_name[name].histograms.keys(), name


def test_what_happened_is_told(watched):
    _, seen, _ = watched
    told = [(event.level, event.actor, event.text) for event in seen[-1].events]
    assert any(level == "warning" and actor == "rollouter/1" and "SIGKILL" in text for level, actor, text in told)
    assert ("info", "rollouter/1", "is ready again") in told
    assert [text for _, actor, text in told if not actor][-1] == "the run is done"


def test_a_heartbeat_is_small(watched):
    _, seen, _ = watched
    end = [snapshot for snapshot in seen if snapshot.run.phase == "running"][-1]
    for actor in end.actors:
        if actor.name != "controller/0":
            assert actor.figures["heartbeats/largest_bytes"] < 16_384, actor.name
            assert actor.figures["facts/late"] == 0

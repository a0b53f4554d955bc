"""A whole run of real actors that has left its terminal, watched, recorded, and stopped from another one."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launcher.launched import marked, sim_run
from ledgers import assert_ledgers_add_up
from recordings import read_recording

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.messages.monitor import Snapshot
from asyncrl.observe.recording import last_recorded
from asyncrl.top.client import find_target, follow
from tools.waiting import wait_until


def stop(run_dir):
    argv = [sys.executable, "-m", "asyncrl.cli.launch", "--stop", str(run_dir)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def is_recorded(run, name, restarts):
    """Whether the recording has a snapshot of the running run with this actor ready after so many restarts."""
    running = [snapshot for snapshot in read_recording(run.run_dir) if snapshot.run.phase == "running"]
    actors = [actor for snapshot in running for actor in snapshot.actors if actor.name == name]
    return any(actor.condition == "ready" and actor.resources and actor.restarts == restarts for actor in actors)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run with a killed rollouter: its output, its snapshots, its recording, and the output of --stop."""
    run = sim_run(tmp_path_factory.mktemp("watched"), "--detach", "--learner.steps", "4000")
    seen = []

    async def look():
        restarts, stopping = 0, None
        async for news in follow(find_target(str(run.run_dir))):
            seen.append(news)
            if stopping or not await asyncio.to_thread(is_recorded, run, "rollouter/1", restarts):
                continue
            if restarts:
                stopping = asyncio.create_task(asyncio.to_thread(stop, run.run_dir))
            else:
                os.kill(by_name(last_recorded(run.run_dir, 1))["rollouter/1"].pid, signal.SIGKILL)
                restarts = 1
        return await stopping

    try:
        wait_until(lambda: (run.run_dir / "private" / "controller.json").exists(), "the controller")
        stopped = asyncio.run(asyncio.wait_for(look(), 120))
        code, shown = run.end()
        assert code == 0, shown
        wait_until(lambda: not marked(run.folder), "the end of all")
        snapshots = [one for one in seen if isinstance(one, Snapshot)]
        yield SimpleNamespace(
            run=run, shown=shown, seen=snapshots, recorded=read_recording(run.run_dir), stopped=stopped
        )
    finally:
        run.close()


def by_name(snapshot):
    return {actor.name: actor for actor in snapshot.actors}


def at_work(watched):
    """The last snapshot before the preemption in which all actors are ready and have sent two heartbeats.

    The second one reports the size of the first.
    """

    def has_reported(actor):
        return "heartbeats/largest_bytes" in actor.metrics or actor.name == "controller/0"

    running = (snapshot for snapshot in watched.seen if snapshot.run.phase == "running")
    return [
        snapshot
        for snapshot in running
        if all(actor.condition == "ready" and has_reported(actor) for actor in snapshot.actors)
    ][-1]


def test_a_detached_run_outlives_its_terminal_and_is_stopped_from_another(watched):
    run, log = watched.run, watched.run.run_dir / "logs" / "attempt_1" / "launcher.log"
    assert watched.shown[-5].startswith("the run continues without this terminal")
    assert watched.shown[-4:] == [
        f"run folder  {run.run_dir}",
        f"output      {log}",
        f"watch       asyncrl-top {run.run_dir}",
        f"end         asyncrl-launch --stop {run.run_dir}",
    ]
    assert f"run folder: {run.run_dir}" in watched.shown
    assert (watched.stopped.returncode, watched.stopped.stderr) == (0, "")
    left = CheckpointFolder(run.run_dir / "checkpoints").newest()
    assert run.steps_trained == list(range(1, left.step + 1)), "nothing is lost"
    first, kept, last = watched.stopped.stdout.splitlines()
    assert first.startswith(f"{run.run_dir} is preempted: ")
    assert kept == (
        f"left: the checkpoint of version {left.version}, step {left.step}: {left.path}; no trained step is lost"
    )
    how = f"preempted by asyncrl-launch --stop with a checkpoint of version {left.version}"
    began = f"asyncrl-launch {run.folder}/sim.toml --detach --learner.steps 4000"
    assert last == f"{how}; to resume: {began} --resume {run.run_dir}"
    written = log.read_text().splitlines()
    assert (written[0], written[-2:]) == (f"run folder: {run.run_dir}", [kept, last])
    assert any(line.startswith("step 1/4000 ") for line in written)
    again = stop(run.run_dir)
    assert again.returncode == 2 and "the run in it has ended" in again.stderr


def test_the_ledgers_of_all_serial_resources_add_up(watched):
    for snapshots in (watched.seen, watched.recorded):
        states = assert_ledgers_add_up(snapshots, watched.run.run_dir)
        names = [name for name, _ in states]
        rollouters = ["rollouter/0 engine", "rollouter/1 engine", "rollouter/1 engine"]
        assert sorted(names) == ["learner/0 rank", "reward/0 worker/0", *rollouters]
    of = {name: found for (name, _), found in states.items()}
    assert {"starting", "waiting", "training", "publishing", "checkpointing"} <= of["learner/0 rank"]
    assert {"starting", "waiting", "generating", "paused", "loading"} <= of["rollouter/0 engine"]


def test_a_viewer_sees_a_run_from_its_start_to_its_end(watched):
    first, end = watched.seen[0], watched.seen[-1]
    assert first.run.phase == "starting" and watched.recorded[-1].run == end.run
    assert {line["step"] for snapshot in watched.seen for line in snapshot.train} == set(watched.run.steps_trained)
    assert {line["replica"] for line in end.updates} == {"rollouter/0", "rollouter/1"}
    walls = [snapshot.wall for snapshot in watched.recorded]
    assert walls == sorted(walls)
    reported = [(event.level, event.actor, event.text) for event in end.events]
    assert any(level == "warning" and actor == "rollouter/1" and "SIGKILL" in text for level, actor, text in reported)
    assert ("info", "rollouter/1", "is ready again") in reported
    assert [text for _, actor, text in reported if not actor][-1].startswith("the run is preempted")


FIGURES = {
    "rollouter/0": "rollout/sampled_tokens rollout/in_flight rollout/oldest_s rollout/kv_use rollout/held",
    "reward/0": "reward/scored reward/queued reward/running",
    "learner/0": "learner/step buffer/groups ledger/trained learner/tokens",
    "dataloader/0": "tickets/outstanding tickets/gate tickets/oldest_s staleness/limit",
    "parameter_server/0": "weights/replicas weights/replicas_behind weights/updates_committed",
}
HISTOGRAMS = {
    "rollouter/0": "rollout/response_tokens rollout/generate_s rollout/reward_s rollout/deliver_s",
    "reward/0": "reward/score_s reward/run_s",
    "learner/0": "staleness/tokens staleness/groups groups/age_s calls/round_trip_s",
    "dataloader/0": "tickets/age_s",
}


def test_each_actor_reports_its_metrics_in_small_heartbeats(watched):
    end = at_work(watched)
    actors = by_name(end)
    for actor in end.actors:
        assert actor.rss_bytes > 1 << 20 and actor.pid
        assert sum(actor.histograms["loop/lag_s"].counts) > 0
        assert 0.0 < actor.loop_busy <= 1.0 and actor.cpu >= 0.0
        if actor.name != "controller/0":
            assert actor.metrics["heartbeats/largest_bytes"] < 16_384 and actor.metrics["facts/late"] == 0, actor.name
    assert actors["rollouter/1"].restarts == 1
    for name, wanted in FIGURES.items():
        assert not set(wanted.split()) - actors[name].metrics.keys(), name
    for name, wanted in HISTOGRAMS.items():
        assert not set(wanted.split()) - actors[name].histograms.keys(), name
    gate = actors["dataloader/0"].metrics
    assert 0 <= gate["tickets/outstanding"] <= gate["tickets/gate"] + end.run.groups_per_step

"""Whole runs of the command with sinks: preempted and resumed; the run continues if the sinks fail."""

import json
import os
import shutil
import signal
import socket
import urllib.request
from urllib.parse import urlsplit

import pytest
from disks import small_disk
from launcher.launched import STEPS, command_line
from tensorboard_files import steps

from asyncrl.checkpoint.folder import CheckpointFolder
from tools.waiting import wait_until

pytestmark = pytest.mark.slow
ALL = ("--sinks.tensorboard", "true", "--sinks.prometheus.enabled", "true", "--sinks.wandb.mode", "offline")
SLOW = ("--reward.function", "held_reward:score", "--reward.options", "{}")
HELD = """
import time
from pathlib import Path

def score(completion):
    time.sleep(0.0 if Path({released!r}).exists() else 0.25)
    return float(len(completion) % 2)
"""
"""A reward with which a step takes two seconds until the file is there. The import of wandb takes a few seconds,
on a busy machine twenty: the run has to train for longer."""


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Ends the slow steps of the test's runs."""
    file = tmp_path / "released"
    (tmp_path / "held_reward.py").write_text(HELD.format(released=str(file)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return file


def logged(run, attempt, actor="*"):
    """Lines of the logs of an attempt, by the actor whose log it is."""
    for path in sorted((run.run_dir / "logs" / f"attempt_{attempt}").glob(f"{actor}.log")):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield path.stem, json.loads(line)


def counters(run):
    """Those of the controller at its end."""
    return next(line["counters"] for _, line in logged(run, 1, "controller-0") if line["event"] == "ended")


def troubles(run, attempt):
    """Warnings and errors that any actor but the sinks logged."""
    return [line for who, line in logged(run, attempt) if line["level"] in ("warning", "error") and who != "sinks-0"]


def trained_once(run):
    """I1: of the steps as they stand no group is trained twice."""
    uids = []
    for step in run.steps_trained:
        lines = (run.run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        uids += [line["uid"] for line in found if line["start"] == found[-1]["start"]]
    return 0 < len(uids) == len(set(uids))


def exposed(where):
    with urllib.request.urlopen(where, timeout=60) as reply:
        return reply.read().decode()


def ended_well(run, known, deaths=()):
    """All steps are trained, no other actor died, and no process is left; returns the lines shown."""
    code, shown = run.end()
    assert code == 0, shown
    assert run.steps_trained == list(range(1, STEPS + 1))
    died = [line.partition(" died ")[0].split()[-1] for line in shown if " died " in line]
    assert died == list(deaths), shown
    wait_until(lambda: not any(title and command_line(pid) == title for pid, title in known.items()), "the end of all")
    return shown


def test_a_run_continues_and_ends_in_time_if_its_sinks_fail(launch, released):
    """Killed, their clients blocked, the process of one killed, and at last they stand still."""
    run = launch(*ALL, *SLOW)
    run.wait_to_show("step 1/")
    address = run.run_dir / "monitor" / "prometheus.json"
    wait_until(address.exists, "the endpoint")
    first = run.actor("sinks/0")
    known = run.processes()
    address.unlink()
    os.kill(first, signal.SIGKILL)
    wait_until(address.exists, "the endpoint of the next one")
    where = json.loads(address.read_text())["address"]
    with socket.create_connection((urlsplit(where).hostname, urlsplit(where).port), timeout=60) as blocked:
        blocked.sendall(b"GET /metrics HTTP/1.1\r\n")
        wait_until(lambda: "asyncrl_run_phase" in exposed(where), "the run's state at the new endpoint")
        core = run.below("wandb-core")
        known |= run.processes()
        os.kill(core, signal.SIGKILL)
        run.wait_to_show("sinks/0: the sink wandb has failed")
        os.kill(run.actor("sinks/0"), signal.SIGSTOP)
        released.touch()
        ended_well(run, known, deaths=["sinks/0"])
    assert counters(run)["sinks/restarts"] == 1


def test_a_run_continues_when_the_disk_of_wandb_is_full(launch, released):
    run = launch(*ALL, *SLOW)
    folder = run.run_dir / "wandb"
    wait_until((run.run_dir / "config.json").exists, "the run folder")
    with small_disk(folder, "16k"):
        run.wait_to_show("step 3/")
        run.actor("sinks/0")
        wait_until(lambda: shutil.disk_usage(folder).free == 0, "the disk to be full")
        released.touch()
        ended_well(run, run.processes())
        assert shutil.disk_usage(folder).free == 0
    assert steps(run.run_dir) == list(range(1, STEPS + 1))
    assert not (run.run_dir / "monitor" / "prometheus.json").exists()
    assert (counters(run)["sinks/restarts"], counters(run)["sinks/dropped"]) == (0, 0)


def test_i1_a_preempted_run_resumes_where_it_stopped_and_continues_in_its_sinks(launch, released):
    run = launch(*ALL, *SLOW)
    run.wait_to_show("step 8/")
    wait_until((run.run_dir / "monitor" / "wandb.json").exists, "wandb")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    left = CheckpointFolder(run.run_dir / "checkpoints").newest()
    assert run.steps_trained == list(range(1, left.step + 1))
    assert troubles(run, 1) == [], "it waited for nothing in vain"
    kept = (run.run_dir / "monitor" / "wandb.json").read_bytes()
    again = launch(*ALL, *SLOW, "--resume", "auto")
    again.wait_to_show(f"/{STEPS}  elapsed ")
    again.actor("sinks/0")
    again.below("wandb-core")
    known = again.processes()
    released.touch()
    shown = ended_well(again, known)
    assert f"resuming {run.run_dir} from version {left.version}, step {left.step}: {left.path}" in shown
    assert troubles(again, 2) == [], "an actor that ends first makes no trouble for the others"
    assert trained_once(again) and steps(again.run_dir) == list(range(1, STEPS + 1))
    assert (run.run_dir / "monitor" / "wandb.json").read_bytes() == kept
    # One file of each attempt, both of the same W&B run.
    written = [path.name for path in run.run_dir.glob("wandb/offline-run-*/*.wandb")]
    assert written == [f"run-{json.loads(kept)['id']}.wandb"] * 2

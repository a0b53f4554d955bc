"""Whole runs with sinks to which everything happens: the run goes on."""

import json
import os
import shutil
import signal
import socket
import urllib.request
from urllib.parse import urlsplit

import pytest
from disks import small_disk
from launcher.launched import STEPS, command_line, wait_until
from tensorboard_files import steps

ALL = ("--sinks.tensorboard", "true", "--sinks.prometheus.enabled", "true", "--sinks.wandb.mode", "offline")
SLOW = ("--learner.sim.step_s", "0.3")
"""Sinks that start while the run trains are up before its end, on a busy machine too."""


def counters(run):
    """Those of the controller at its end."""
    text = (run.run_dir / "logs" / "attempt_1" / "controller-0.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return next(line["counters"] for line in lines if line["event"] == "ended")


def exposed(where):
    with urllib.request.urlopen(where, timeout=60) as reply:
        return reply.read().decode()


def ended_well(run, known, deaths=()):
    """All steps trained, nobody died but these, and no process is left of those that were seen."""
    code, shown = run.end()
    assert code == 0, shown
    assert run.steps() == list(range(1, STEPS + 1))
    died = [line.partition(" died ")[0].split()[-1] for line in shown if " died " in line]
    assert died == list(deaths), shown
    wait_until(lambda: not any(title and command_line(pid) == title for pid, title in known.items()), "the end of all")


def test_a_run_goes_on_and_ends_in_time_whatever_befalls_its_sinks(launch):
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
        ended_well(run, known, deaths=["sinks/0"])
    assert counters(run)["sinks/restarts"] == 1


@pytest.mark.slow
def test_a_run_goes_on_when_the_disk_of_wandb_is_full(launch):
    run = launch(*ALL)
    folder = run.run_dir / "wandb"
    wait_until((run.run_dir / "config.json").exists, "the run folder")
    with small_disk(folder, "16k"):
        run.wait_to_show("step 3/")
        run.actor("sinks/0")
        known = run.processes()
        ended_well(run, known)
        assert shutil.disk_usage(folder).free == 0
    assert steps(run.run_dir) == list(range(1, STEPS + 1))
    assert not (run.run_dir / "monitor" / "prometheus.json").exists()
    assert (counters(run)["sinks/restarts"], counters(run)["sinks/dropped"]) == (0, 0)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_sinks(launch):
    run = launch(*ALL)
    run.wait_to_show("step 8/")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    kept = (run.run_dir / "monitor" / "wandb.json").read_bytes()
    again = launch(*ALL, *SLOW, "--resume", "auto")
    again.wait_to_show(f"/{STEPS}  elapsed ")
    again.actor("sinks/0")
    again.below("wandb-core")
    ended_well(again, again.processes())
    assert steps(again.run_dir) == list(range(1, STEPS + 1))
    assert (run.run_dir / "monitor" / "wandb.json").read_bytes() == kept
    # One file of each attempt, both of the same W&B run.
    written = [path.name for path in run.run_dir.glob("wandb/offline-run-*/*.wandb")]
    assert written == [f"run-{json.loads(kept)['id']}.wandb"] * 2

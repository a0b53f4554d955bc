"""Whole simulated runs of the command, with every real actor in its own process: killed, preempted, resumed."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from launched import command_line, wait_until

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.launcher.processes import children_of
from asyncrl.launcher.progress import read_metrics

STEPS = 40
CONFIG = f"""
[run]
name = "trial"
[data]
source = "synthetic"
size = 400
[rollout]
engine = "sim"
replicas = 2
samples_per_prompt = 2
concurrency = 8
max_tokens = 64
sim = {{ length_median = 16.0, decode_step_s = 0.002, load_s = 0.002 }}
[reward]
function = "constant"
workers = 1
[learner]
backend = "sim"
steps = {STEPS}
groups_per_step = 4
dynamic_sampling = false
sim = {{ step_s = 0.15, publish_bytes = 4096 }}
[checkpoint]
every_versions = 5
[supervision]
heartbeat_s = 0.5
"""


class Run:
    """``asyncrl-launch`` in a folder, followed by its output."""

    def __init__(self, folder, *flags):
        self.folder, self.run_dir = folder, folder / "runs" / "trial"
        config = folder / "sim.toml"
        config.write_text(CONFIG)
        self.out = folder / f"out-{len(list(folder.glob('out-*')))}.txt"
        argv = [sys.executable, "-m", "asyncrl.cli.launch", str(config), "--run.dir", str(folder / "runs"), *flags]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def shown(self):
        return self.out.read_text()

    def wait_to_show(self, text):
        wait_until(lambda: text in self.shown or self.process.poll() is not None, text)
        assert text in self.shown, self.shown

    def end(self):
        return self.process.wait(120), self.shown.splitlines()

    def processes(self):
        """Title by pid of the launcher and all below it. Actors have the titles that people see."""
        pids = [self.process.pid]
        for pid in pids:
            pids += children_of(pid)
        return {pid: command_line(pid) for pid in pids}

    def actor(self, name):
        return wait_until(lambda: next((p for p, words in self.processes().items() if f" {name} " in words), 0), name)

    def steps(self):
        return [line["step"] for line in read_metrics(self.run_dir / "metrics.jsonl") if line["kind"] == "train"]


@pytest.fixture
def launch(tmp_path):
    runs = []

    def start(*flags):
        runs.append(Run(tmp_path, *flags))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.processes() if run.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def trained_once(run):
    """I1: of the steps as they stand no group is trained twice; (groups, of which different)."""
    uids = []
    for step in run.steps():
        lines = (run.run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        uids += [line["uid"] for line in found if line["start"] == found[-1]["start"]]
    return len(uids), len(set(uids))


def test_training_goes_on_while_the_controller_is_away(launch):
    run = launch("--learner.steps", "100")
    run.wait_to_show("step 8/")
    learner = run.actor("learner/0")
    os.kill(run.actor("controller/0"), signal.SIGKILL)
    run.wait_to_show("controller/0 died (killed by SIGKILL) and is started again")
    # Its successor hands on what is trained from then on.
    wait_until(lambda: "step " in run.shown.partition("is started again")[2], "another step")
    assert run.actor("learner/0") == learner
    code, shown = run.end()
    assert code == 0, shown
    assert sum(" died " in line for line in shown) == 1, shown
    assert run.steps() == list(range(1, 101))


def test_a_preempted_run_is_resumed_where_it_stopped(launch):
    run = launch()
    run.wait_to_show("step 8/")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    left = CheckpointFolder(run.run_dir / "checkpoints").newest()
    assert run.steps() == list(range(1, left.step + 1))
    again = launch("--resume", "auto")
    code, shown = again.end()
    assert code == 0, shown
    assert f"resuming {run.run_dir} from version {left.version}, step {left.step}: {left.path}" in shown
    assert again.steps() == list(range(1, STEPS + 1))
    groups, different = trained_once(again)
    assert groups == different > 0
    assert sorted(entry.name for entry in (run.run_dir / "logs").iterdir()) == ["attempt_1", "attempt_2"]
    done = launch("--resume", "auto", "--checkpoint.export_at_end", "false")
    code, shown = done.end()
    assert (code, shown) == (0, [f"{run.run_dir} is finished: step {STEPS} of {STEPS}; raise learner.steps to go on"])


def test_a_run_that_was_killed_as_a_whole_is_resumed(launch):
    """I1, I7: nothing but files is left of it, and they are enough."""
    run = launch()
    run.wait_to_show("step 12/")
    processes = run.processes()
    assert len(processes) > 8, processes
    for pid, words in processes.items():
        # Actors do not outlive their agent, even if there is no guard any more.
        if not words.startswith("asyncrl "):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: not any(command_line(pid) for pid in processes), "the end of all")
    again = launch("--resume", "auto")
    code, shown = again.end()
    assert code == 0, shown
    assert "left behind by a run that was killed" in shown[0]
    assert again.steps() == list(range(1, STEPS + 1))
    groups, different = trained_once(again)
    assert groups == different > 0

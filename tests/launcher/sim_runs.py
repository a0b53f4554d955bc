"""Whole simulated runs of the command, every real actor in its own process."""

import fcntl
import signal
import subprocess
import sys
import termios

from launcher.launched import command_line, wait_until

from asyncrl.runtime.processes import children_of
from asyncrl.telemetry.metrics_line import read_metrics

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
options = {{ spread = 1.0 }}
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
    """``asyncrl-launch`` in a folder, followed by its output, or on a terminal of this descriptor."""

    def __init__(self, folder, *flags, terminal=None):
        self.folder, self.run_dir = folder, folder / "runs" / "trial"
        config = folder / "sim.toml"
        config.write_text(CONFIG)
        self.out = folder / f"out-{len(list(folder.glob('out-*')))}.txt"
        argv = [sys.executable, "-m", "asyncrl.cli.launch", str(config), "--run.dir", str(folder / "runs"), *flags]
        if terminal is not None:
            on = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
            # It is the terminal's only when its session's leader has taken it.
            self.process = subprocess.Popen(argv, **on, start_new_session=True, preexec_fn=_take_terminal)
            return
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


def _take_terminal():
    # Under nohup it would be ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

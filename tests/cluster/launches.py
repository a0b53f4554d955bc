"""Runs asyncrl-launch on the hosts of a test cluster, and follows its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.launched import Launched, next_output

from tools.chaos.audit import Expected, audit
from tools.cluster.netns import REPOSITORY, Cluster, Host
from tools.waiting import wait_until

WAIT_S = 120.0
RUN_S = 400.0
"""The longest a run over lost hosts may take."""
GROUPS = 4
"""Prompt groups per step."""
SECRET = "whisper these very words to nobody"
"""In each prompt."""
CONFIG = """
[run]
name = "trial"
dir = "{folder}/runs"
[data]
path = "{folder}/prompts.jsonl"
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
steps = 12
groups_per_step = 4
dynamic_sampling = false
sim = {{ step_s = 0.1, publish_bytes = 4096 }}
[supervision]
heartbeat_s = 0.5
start_timeout_s = 60
drain_s = 6
host_grace_s = 8
"""


class Command(Launched):
    """asyncrl-launch with these arguments on a host; ``path`` is its PYTHONPATH."""

    wait_s = WAIT_S

    def __init__(self, host: Host, folder: Path, *argv: str, path: str = "") -> None:
        self.out = next_output(folder)
        with self.out.open("w") as out:
            self.process: subprocess.Popen[Any] = host.popen(
                [sys.executable, "-m", "asyncrl.cli.launch", *argv],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": path or str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )


class Launch(Command):
    """A run, called on the head or another host, in a folder that the hosts share only on request."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        hosts: str,
        *flags: str,
        ssh_args: str = "",
        caller: str = "head",
        config: str = "",
        path: str = "",
    ) -> None:
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "runs" / "trial"
        folder.mkdir(exist_ok=True)
        (folder / "hosts").write_text(hosts)
        (folder / "trial.toml").write_text(config or CONFIG.format(folder=folder))
        rows = [json.dumps({"prompt": f"{SECRET} {number}"}) for number in range(400)]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        argv = [str(folder / "trial.toml"), "--hosts", str(folder / "hosts")]
        argv += ["--ssh-args", ssh_args or f"-F {cluster.ssh_config}", *flags]
        super().__init__(cluster[caller], folder, *argv, path=path)

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / "attempt_1" / f"{name}.log").read_text()


class Trained(Launch):
    """A simulated run of this many steps of a quarter of a second, audited at its end; ``path`` is its PYTHONPATH."""

    def __init__(
        self, cluster: Cluster, folder: Path, steps: int, *flags: str, hosts: str = "head\na\n", path: str = ""
    ) -> None:
        self.steps = steps
        settings = {
            "learner.steps": steps,
            "learner.sim.step_s": 0.25,
            "rollout.sim.length_median": 24.0,
            "rollout.sim.decode_step_s": 0.01,
            "run.samples_per_step": GROUPS,
            "data.source": "synthetic",
            "data.size": 2 * GROUPS * steps,
            "network.call_timeout_s": 5,
        }
        words = (f"--{key}={value}" for key, value in settings.items())
        super().__init__(cluster, folder, hosts, *words, *flags, path=path)

    @property
    def step(self) -> int:
        """The newest step of the metrics."""
        return max(self.steps_trained, default=0)

    def wait_for_step(self, more: int) -> None:
        """Wait for this many further steps."""
        wanted = self.step + more
        wait_until(lambda: self.step >= wanted or self.process.poll() is not None, f"step {wanted}", WAIT_S)
        assert self.process.poll() is None, self.shown

    def events(self, actor: str, event: str) -> list[dict[str, Any]]:
        """Lines of this event in the log of an actor (``rollouter-0``)."""
        return [line for line in map(json.loads, self.log(actor).splitlines()) if line["event"] == event]

    def is_exact(self) -> None:
        """The run ends, and no prompt was lost or trained twice."""
        code, shown = self.end(RUN_S)
        assert code == 0, shown
        size = 2 * GROUPS * self.steps
        findings = audit(self.run_dir, Expected(steps=self.steps, groups_per_step=GROUPS, prompts=size))
        assert [str(problem) for problem in findings.problems] == []

    def is_gone_from(self, *hosts: str) -> None:
        for name in hosts:
            wait_until(lambda host=self.cluster[name]: not host.processes(), f"an end of everything on {name}")


def process(host: Host, words: str) -> int:
    """The process of a host whose command line has these words, once it has started."""

    def find() -> int | None:
        return next((pid for pid, line in host.processes().items() if words in line), None)

    found: int = wait_until(find, f"{words} on {host.name}")
    return found


def left(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Leftovers of runs in a folder: processes, shared memory, keys, and any file on hosts other than the head."""
    found: dict[str, Any] = {}
    for host in cluster.all_hosts:
        if not host.is_on:
            continue
        if processes := host.processes():
            found[f"processes of {host.name}"] = processes
        if memory := [entry.name for entry in host.path("/dev/shm").iterdir()]:
            found[f"shared memory of {host.name}"] = memory
        runs = host.path(folder / "runs")
        if keys := [str(path) for path in runs.glob("*/private*")]:
            found[f"keys on {host.name}"] = keys
        if host is not cluster.head and (files := [str(path) for path in runs.rglob("*") if path.is_file()]):
            found[f"files on {host.name}"] = files
    return found

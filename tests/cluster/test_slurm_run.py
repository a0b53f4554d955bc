"""The batch scripts and asyncrl-launch --slurm on two nodes: simulated runs that end, are preempted and are killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cluster.launches import CONFIG
from cluster.slurm import NODES, Slurm

from asyncrl.observe.metrics_line import read_metrics
from tools.chaos.audit import Expected, audit
from tools.cluster.netns import REPOSITORY
from tools.waiting import wait_until

SCRIPT = REPOSITORY / "launch" / "slurm" / "train.sbatch"
PYTHON = f"{sys.executable} -m asyncrl.cli.launch"
PROMPTS, GROUPS = 500, 4
LONG, SHORT = 110, 12
RUN_S = 150.0
WARM = "\n[checkpoint]\nevery_versions = 4\n"


class Job:
    """A job that trains, in the folder that all nodes share."""

    def __init__(self, slurm: Slurm, *flags: str, env: dict[str, str] | None = None) -> None:
        self.slurm, self.folder, self.run_dir = slurm, slurm.shared, slurm.shared / "runs" / "trial"
        self.file = self.folder / "trial.toml"
        self.file.write_text(CONFIG.format(folder=self.folder) + WARM)
        rows = [json.dumps({"prompt": f"prompt {number}"}) for number in range(PROMPTS)]
        (self.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        self.out = self.folder / "out.txt"
        options = ["--parsable", f"--output={self.out}", str(SCRIPT), str(self.file), *flags]
        given = {**slurm.env, "ASYNCRL_LAUNCH": PYTHON, **(env or {})}
        self.number = int(slurm.run("sbatch", *options, env=given).stdout)

    @property
    def shown(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def wait_to_show(self, text: str) -> None:
        def there() -> bool:
            return text in self.shown or self.slurm.job(self.number)["JobState"] in ("FAILED", "COMPLETED")

        wait_until(there, f"{text!r} of job {self.number}", RUN_S)
        assert text in self.shown, self.shown

    def end(self) -> dict[str, str]:
        return self.slurm.wait_for(self.number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=RUN_S)

    def start_again(self) -> None:
        wait_until(lambda: self.slurm.job(self.number)["Restarts"] == "1", f"the requeue: {self.shown}", RUN_S)
        self.slurm.start_now(self.number)

    def lines(self, name: str, attempt: int) -> list[dict[str, object]]:
        text = (self.run_dir / "logs" / f"attempt_{attempt}" / f"{name}.log").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def check(self, steps: int) -> None:
        """I1 over all files, and I7 on the nodes."""
        found = audit(self.run_dir, Expected(steps, GROUPS, PROMPTS))
        assert not [problem for problem in found.problems if problem.kind != "unrecorded"], found.problems
        for node in NODES:
            wait_until(lambda node=node: not self.slurm.processes(node), f"the end of all on {node}")
        assert not list(self.run_dir.glob("private*"))


def places(job: Job, attempt: int) -> dict[str, str]:
    """Maps each rollouter to the agent that started it."""
    found = {}
    for index in range(len(NODES)):
        text = (job.run_dir / "logs" / f"attempt_{attempt}" / f"agent-{index}.log").read_text()
        found |= {name: NODES[index] for name in ("rollouter/0", "rollouter/1") if f'"{name}"' in text}
    return found


def test_i1_a_preempted_job_resumes_where_it_was(slurm: Slurm) -> None:
    """USR2 to the batch script, a checkpoint, exit code 75, back into the queue, and on to the end."""
    job = Job(slurm, "--learner.steps", str(LONG))
    job.wait_to_show("step 4/")
    slurm.run("scancel", "--batch", "--signal=USR2", str(job.number))
    job.start_again()
    assert "stopping: a checkpoint is written" in job.shown, job.shown
    first = read_metrics(job.run_dir / "metrics.jsonl")
    done = max(line["step"] for line in first if line["kind"] == "train")
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), job.shown
    assert f"job {job.number}, start 2" in job.shown
    assert f", step {done}: " in job.shown, "not resumed from the checkpoint of its preemption"
    assert sorted(places(job, attempt=2).values()) == sorted(NODES)
    assert json.loads((job.run_dir / "config.json").read_text())["security"]["curve"] == "required"
    job.check(LONG)


def test_i1_a_killed_job_resumes_when_it_is_queued_again_and_stays_in_the_container_of_the_site(slurm: Slurm) -> None:
    """From its newest checkpoint; no process was warned. The container's command precedes Python on all nodes."""
    container = "--comment=here env ASYNCRL_HERE=1"
    env = {"ASYNCRL_CONTAINER": container, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = Job(slurm, "--learner.steps", str(LONG), env=env)
    job.wait_to_show("step 6/")
    for node in NODES:
        there = slurm.processes(node)
        agents = [pid for pid, words in there.items() if "asyncrl.launcher.node.agent" in words]
        assert len(agents) == 1, there
        assert b"ASYNCRL_HERE=1" in Path(f"/proc/{agents[0]}/environ").read_bytes().split(b"\0")
    wait_until(lambda: list(job.run_dir.glob("checkpoints/*")), "a checkpoint")
    slurm.run("scontrol", "requeue", str(job.number))
    job.start_again()
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), job.shown
    assert "resuming " in job.shown
    job.check(LONG)


def test_i7_a_cancelled_job_leaves_nothing(slurm: Slurm) -> None:
    """SIGTERM preempts the run, but SLURM was asked to end it."""
    job = Job(slurm, "--learner.steps", "4000")
    job.wait_to_show("step 2/")
    slurm.run("scancel", str(job.number))
    assert slurm.wait_for(job.number, "CANCELLED", timeout=RUN_S)["Restarts"] == "0", job.shown
    for node in NODES:
        wait_until(lambda node=node: not slurm.processes(node), f"the end of all on {node}")


def test_a_run_starts_from_the_shell_of_an_allocation(slurm: Slurm) -> None:
    """The head is a node, and the launcher is not."""
    folder = slurm.shared
    (folder / "trial.toml").write_text(CONFIG.format(folder=folder))
    argv = [*PYTHON.split(), "trial.toml", "--data.source", "synthetic", "--inside-slurm"]
    said = slurm.run("salloc", "--nodes=2", *argv, timeout=RUN_S)
    steps = [line["step"] for line in read_metrics(folder / "runs/trial/metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(1, SHORT + 1)), said.stdout
    assert not any(slurm.processes(node) for node in NODES)


def test_the_command_submits_a_job(slurm: Slurm) -> None:
    (slurm.shared / "trial.toml").write_text(CONFIG.format(folder=slurm.shared))
    argv = [*PYTHON.split(), "trial.toml", "--data.source", "synthetic", "--slurm", "--nodes", "2"]
    said = slurm.run(
        *argv, "--sbatch-args", "--comment='of the test'", env={**slurm.env, "PYTHONPATH": str(REPOSITORY)}
    )
    number = int(said.stdout.split()[2])
    assert said.stdout.endswith(f"{slurm.shared}/runs/trial-{number}.out\n"), said.stdout
    ended = slurm.wait_for(number, "COMPLETED", "FAILED", timeout=RUN_S)
    shown = (slurm.shared / "runs" / f"trial-{number}.out").read_text()
    assert ended["ExitCode"] == "0:0", shown
    assert (ended["NumNodes"], ended["WorkDir"]) == ("2", str(slurm.shared))
    steps = [
        line["step"] for line in read_metrics(slurm.shared / "runs/trial/metrics.jsonl") if line["kind"] == "train"
    ]
    assert steps == list(range(1, SHORT + 1))

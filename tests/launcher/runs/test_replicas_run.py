"""Whole simulated runs in which a replica is cut off, or cannot be kept alive, with every actor in its own process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_actor import mark
from launcher.launched import command_line, wait_until

from asyncrl.config.load import validate_config
from asyncrl.telemetry.metrics_line import read_metrics
from asyncrl.telemetry.snapshots.recording import last_recorded
from asyncrl.runtime.processes import children_of
from tools.chaos.audit import Expected, audit

pytestmark = pytest.mark.timeout(300)
FAULTY = Path(__file__).parent / "faulty_actor.py"
GROUPS = 4


def tree(folder, **tables):
    found = {
        "run": {"name": "trial", "dir": str(folder / "runs")},
        "data": {"source": "synthetic", "size": 4096},
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "samples_per_prompt": 2,
            "concurrency": 8,
            "max_tokens": 64,
            "sim": {"length_median": 16.0, "decode_step_s": 0.002, "load_s": 0.002},
        },
        "reward": {"function": "constant", "options": {"spread": 1.0}, "workers": 1},
        "learner": {
            "backend": "sim",
            "steps": 30,
            "groups_per_step": GROUPS,
            "dynamic_sampling": False,
            "sim": {"step_s": 0.05, "publish_bytes": 4096},
        },
        "staleness": {"max": 1},
        "checkpoint": {"every_versions": 5, "export_at_end": False},
        "monitor": {"record_s": 0.5},
        "network": {"call_timeout_s": 4.0},
        "supervision": {"heartbeat_s": 0.25, "backoff_s": 0.05, "unreachable_s": 3.0},
    }
    for name, table in tables.items():
        found[name] = found.get(name, {}) | table
    return found


class Run:
    """A run of actors with ``faults``, in a process of its own."""

    def __init__(self, folder, faults, **tables):
        self.run_dir = folder / "runs" / "trial"
        self.out = folder / "out.txt"
        self.config = validate_config(tree(folder, **tables))
        argv = [sys.executable, str(FAULTY), "launch", json.dumps(faults), json.dumps(tree(folder, **tables))]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def shown(self):
        return self.out.read_text()

    def shows(self, text):
        wait_until(lambda: text in self.shown or self.process.poll() is not None, lambda: f"{text!r} in {self.shown}")
        assert text in self.shown, self.shown

    def breaks(self, name):
        wait_until(self.run_dir.exists, "the run folder")
        mark(self.run_dir, name).touch()

    def mends(self, name):
        mark(self.run_dir, name).unlink()

    def steps(self):
        with contextlib.suppress(FileNotFoundError):
            return [line["step"] for line in read_metrics(self.run_dir / "metrics.jsonl") if line["kind"] == "train"]
        return []

    def trains(self, steps):
        """More than there are."""
        before = len(self.steps())
        wait_until(lambda: len(self.steps()) >= before + steps or self.process.poll() is not None, "more steps")

    def end(self):
        return self.process.wait(200), self.shown

    def recorded(self):
        return last_recorded(self.run_dir, 1)

    def serves(self, name="rollouter/1"):
        actor = {actor.name: actor for actor in self.recorded().actors}[name]
        return actor.condition == "ready" and actor.figures.get("rollout/trajectories", 0) > 0

    def close(self):
        pids = [self.process.pid] if self.process.poll() is None else []
        for pid in pids:
            pids += children_of(pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not any(command_line(pid) for pid in pids), "the end of all")


@pytest.fixture
def launch(tmp_path):
    runs = []

    def start(faults, **tables):
        runs.append(Run(tmp_path, faults, **tables))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def assert_exact(run):
    """Every prompt of the data from the first on has been trained once, and there is none beside."""
    assert run.steps() == list(range(1, run.config.learner.steps + 1))
    size = run.config.data.size
    findings = audit(run.run_dir, Expected(steps=run.config.learner.steps, groups_per_step=GROUPS, prompts=size))
    assert not findings.problems, "\n".join(map(str, findings.problems))


def bring_back(run, name):
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli.launch", "--bring-back", name, str(run.run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_rollouter_that_is_cut_off_from_the_learner_alone_is_fenced_and_the_run_completes(launch):
    """It beats, leases and generates; with a staleness bound of 1 the run would stand for what it holds."""
    run = launch({"rollouter/1": {"cut": ["learner/0"]}}, learner={"steps": 60})
    run.shows("step 3/")
    run.breaks("rollouter/1")
    run.shows("rollouter/1 died (killed by SIGKILL: it could not reach learner/0, as 1 other rollouter did, for 3 s")
    # Its successor is cut off too, and holds nothing that the others would wait for.
    run.trains(10)
    run.mends("rollouter/1")
    code, shown = run.end()
    assert code == 0, shown
    assert "learner/0 died" not in shown and "rollouter/0 died" not in shown, shown
    assert_exact(run)


@pytest.mark.slow
def test_a_learner_that_no_rollouter_reaches_is_started_again_from_its_checkpoint(launch):
    cut = {"cut": ["learner/0"]}
    run = launch({"rollouter/0": cut, "rollouter/1": cut}, learner={"steps": 40})
    run.shows("step 8/")
    for name in ("rollouter/0", "rollouter/1"):
        run.breaks(name)
    run.shows("learner/0 died (killed by SIGKILL: it was not reached by rollouter/0, rollouter/1 for 3 s")
    for name in ("rollouter/0", "rollouter/1"):
        run.mends(name)
    code, shown = run.end()
    assert code == 0, shown
    assert "rollouter/0 died" not in shown and "rollouter/1 died" not in shown, shown
    assert_exact(run)


def test_a_replica_that_cannot_be_kept_alive_is_set_aside_until_somebody_brings_it_back(launch):
    run = launch(
        {"rollouter/1": {"dies": True}},
        supervision={**tree(Path())["supervision"], "max_restarts": 1},
        learner={"steps": 1_000_000},
        preempt={"grace_s": 60.0},
    )
    run.breaks("rollouter/1")
    run.shows(
        "controller/0: rollouter/1 is set aside: exit code 3, after 1 restarts within 600 s: these are my last words"
    )
    assert "The run goes on without it; it is tried again after 600 s" in run.shown
    run.trains(5)
    wait_until(lambda: run.recorded() and run.recorded().run.aside, "a snapshot that shows it")
    snapshot = run.recorded()
    assert list(snapshot.run.aside) == ["rollouter/1"] and "my last words" in snapshot.run.aside["rollouter/1"]
    assert {actor.name: actor.condition for actor in snapshot.actors}["rollouter/1"] == "aside"
    refused = bring_back(run, "rollouter/0")
    assert refused.returncode == 2, refused
    assert "rollouter/0 cannot be brought back: set aside is rollouter/1" in refused.stderr
    run.mends("rollouter/1")
    done = bring_back(run, "rollouter/1")
    assert (done.returncode, done.stdout) == (0, "rollouter/1 is started again\n"), done
    wait_until(lambda: run.recorded().run.aside == {}, "a snapshot without it")
    wait_until(run.serves, "its trajectories")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    summary = shown.rpartition("run folder")[2]
    assert "controller/0: rollouter/1 was set aside (exit code 3, after 1 restarts within 600 s" in summary


@pytest.mark.slow
def test_a_replica_that_is_set_aside_is_tried_again_after_its_rest_and_the_run_completes(launch):
    run = launch(
        {"rollouter/1": {"dies": True}},
        supervision={**tree(Path())["supervision"], "max_restarts": 0, "restart_window_s": 3.0},
        learner={"steps": 200},
    )
    run.breaks("rollouter/1")
    run.shows("is set aside: exit code 3, after 0 restarts within 3 s: these are my last words")
    wait_until(lambda: run.recorded() and run.recorded().run.aside, "a snapshot that shows it")
    run.mends("rollouter/1")
    wait_until(run.serves, "its trajectories")
    code, shown = run.end()
    assert code == 0, shown
    assert "controller/0: rollouter/1 was set aside (exit code 3" in shown.rpartition("run folder")[2], shown
    assert_exact(run)


def test_with_fewer_than_are_needed_the_run_fails_and_says_so(launch):
    run = launch(
        {"rollouter/1": {"dies": True}},
        supervision={**tree(Path())["supervision"], "max_restarts": 0},
        rollout={**tree(Path())["rollout"], "min_replicas": 2},
    )
    run.breaks("rollouter/1")
    code, shown = run.end()
    assert code == 1, shown
    last = shown.splitlines()[-1]
    assert last.startswith("rollouter/1: exit code 3, after 0 restarts within 600 s: these are my last words"), shown
    assert "1 of 2 rollouters are left, and rollout.min_replicas is 2" in last

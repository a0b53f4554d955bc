"""Whole simulated runs whose episodes are played beside rollouters and by a host of its own, which dies or freezes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launcher.launched import command_line, wait_until

from asyncrl.runtime.processes import children_of
from tools.chaos.audit import Expected, audit, read_lines

GROUPS = 4
EXTRA = "episodes/2"
"""Where rollouters are on a and b."""


def tree(folder, steps, supervision=None, **episode):
    return {
        "run": {"name": "trial", "dir": str(folder / "runs"), "samples_per_step": GROUPS},
        "data": {"source": "synthetic", "size": 2 * GROUPS * steps, "max_prompt_tokens": 64, "template": "chat"},
        "episode": {
            "function": "asyncrl.episodes.rehearsal:play",
            "options": {"turns": 3.0, "tool_s": 0.2, "tool_sigma": 0.3, "observation": 40.0},
            "workers": 1,
            "max_context_tokens": 2048,
            **episode,
        },
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "samples_per_prompt": 2,
            "max_tokens": 64,
            "concurrency": 8,
            "episodes": 6,
            "retry_backoff_s": 0.1,
            "sim": {"length_median": 16.0, "decode_step_s": 0.002, "load_s": 0.002},
        },
        "learner": {
            "backend": "sim",
            "steps": steps,
            "groups_per_step": GROUPS,
            "dynamic_sampling": False,
            "sim": {"step_s": 0.1, "publish_bytes": 4096},
        },
        "staleness": {"max": 2},
        "checkpoint": {"every_versions": 4, "export_at_end": False},
        "supervision": {"heartbeat_s": 0.5, "silence_s": 3.0, "backoff_s": 0.1} | (supervision or {}),
    }


class Run:
    def __init__(self, folder, steps=24, **options):
        self.run_dir, self.out, self.steps = folder / "runs" / "trial", folder / "out.txt", steps
        (folder / "config.json").write_text(json.dumps(tree(folder, steps, **options)))
        argv = [sys.executable, str(Path(__file__).with_name("all_here.py")), str(folder / "config.json"), "head,a,b,c"]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_for_step(self, step):
        def is_there():
            assert self.process.poll() is None, self.out.read_text()
            lines = read_lines(self.run_dir / "metrics.jsonl")[0] if (self.run_dir / "metrics.jsonl").exists() else []
            return any(line["kind"] == "train" and line["step"] >= step for line in lines)

        wait_until(is_there, f"step {step}")

    def processes(self):
        pids = [self.process.pid]
        for pid in pids:
            pids += children_of(pid)
        return pids

    def actor(self, name):
        words = f"asyncrl {name} "
        return wait_until(lambda: next((pid for pid in self.processes() if words in command_line(pid)), 0), name)

    def lines(self, actor):
        text = (self.run_dir / "logs" / "attempt_1" / f"{actor.replace('/', '-')}.log").read_text()
        # The last may not be whole so far.
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]

    def samples(self):
        """What befell each sample, as [what, facts ...] in order."""
        lines = [line for actor in ("rollouter/0", "rollouter/1") for line in self.lines(actor)]
        left = [line for line in lines if line["event"] == "generated" and line["end"] != "running"]
        return [[event[1:] for event in sample] for line in left for sample in line["samples"]]

    def is_exact(self):
        assert self.process.wait(120) == 0, self.out.read_text()
        expected = Expected(steps=self.steps, groups_per_step=GROUPS, prompts=2 * GROUPS * self.steps)
        findings = audit(self.run_dir, expected)
        assert [str(problem) for problem in findings.problems] == []


@pytest.fixture
def launch(tmp_path):
    runs = []

    def start(**options):
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.processes() if run.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def failures(sample):
    """(host, why) of what failed of a sample, but for what its rollouter gave up at the end."""
    host, found = "", []
    for what, *facts in sample:
        if what == "episode":
            host = facts[1]
        elif what == "failed":
            found.append((host, facts[0]))
    return found


def hosts(samples):
    """Episodes begun at each host."""
    return Counter(event[2] for sample in samples for event in sample if event[0] == "episode")


@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
def test_what_a_lost_host_played_is_played_elsewhere_and_nothing_is_lost(launch, how):
    """I1: and no attempt is counted."""
    # One that is frozen is found out after a while; its successor is to have steps left to play for.
    run = launch(steps=24 if how == "killed" else 72)
    run.wait_for_step(3)
    os.kill(run.actor(EXTRA), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    run.is_exact()
    shown = run.out.read_text()
    assert f"{EXTRA} died (killed by SIGKILL" in shown and f"{EXTRA} is ready again" in shown, shown
    samples = run.samples()
    lost = [sample for sample in samples if failures(sample)]
    assert lost and {host for sample in lost for host, _ in failures(sample)} == {EXTRA}
    assert all("begun anew, no attempt is counted" in why for sample in lost for _, why in failures(sample)), lost
    moved = [next(event[2] for event in reversed(sample) if event[0] == "episode") for sample in lost]
    assert set(moved) <= {"episodes/0", "episodes/1"}
    began = hosts(samples)
    assert began.keys() == {"episodes/0", "episodes/1", EXTRA}
    # Its successor plays as well.
    assert run.lines(EXTRA)[-1]["counters"]["episodes/played"] > 0


@pytest.mark.slow
def test_what_a_host_that_stands_still_was_given_is_late_and_played_elsewhere(launch):
    """I1: by the deadlines of its stages, where nobody has found it frozen."""
    run = launch(supervision={"silence_s": 600.0}, turn_timeout_s=2.0, timeout_s=4.0)
    run.wait_for_step(3)
    pid = run.actor(EXTRA)
    os.kill(pid, signal.SIGSTOP)

    def late():
        return [sample for sample in run.samples() if EXTRA in dict(failures(sample))]

    wait_until(late, "what is late")
    os.kill(pid, signal.SIGCONT)
    run.is_exact()
    assert EXTRA + " died" not in run.out.read_text()
    for sample in late():
        played = [event[2] for event in sample if event[0] == "episode"]
        assert played[played.index(EXTRA) + 1] in ("episodes/0", "episodes/1"), sample
        assert sample[-1][0] in ("ended", "scored"), sample
        why = dict(failures(sample))[EXTRA]
        assert re.match(r"(episode|generation): (host|start|turn): ", why), why

"""The tool that breaks runs, at a small size: with as many processes and signals as a test has time for."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.chaos.plan import TURNS

OF_EPISODES = ["--faults", "6", "--kind", "kill", "--kind", "freeze", "--episodes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "trained"),
    [
        (["--faults", "8", "--everything", "2"], 100),
        (["--faults", "6", "--in-updates", "--kind", "kill", "--kind", "freeze"], 50),
        (["--faults", "8", "--time-slices", "--kind", "kill", "--kind", "freeze"], 100),
        ([*OF_EPISODES, "function"], 50),
        ([*OF_EPISODES, "command"], 50),
    ],
    ids=["everybody", "in updates", "time slices", "functions", "commands"],
)
def test_i1_i5_i7_a_run_with_repeated_faults_loses_nothing_and_leaves_nothing(arguments, trained):
    """Processes are killed, frozen or delayed; disk and network fail for a while; the run is killed, and preempted.
    Agents, workers and hosts of episodes are hit in the middle of turns, engines and learners in the middle of weight
    updates, after which every replica serves new versions again, and in every phase of the time slices of a GPU.
    """
    seed = random.randrange(1 << 32)
    command = [sys.executable, "-m", "tools.chaos", *arguments, "--seed", str(seed), "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["problems"] == []
    ends = {"everything", "preempt"} if "--everything" in arguments else set()
    assert len(report["faults"]) == int(arguments[1]) + len(ends)
    assert {one["fault"]["kind"] for one in report["faults"]} >= ends
    assert report["figures"]["trained"] > trained
    if "--in-updates" in arguments:
        assert all(one["fault"]["during"] for one in report["faults"])
        assert any(one["phase"] == one["fault"]["during"] for one in report["faults"])
    if "--time-slices" in arguments:
        assert any(one["phase"] in TURNS for one in report["faults"])

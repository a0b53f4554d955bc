"""The tools that break runs, in small: as many processes and signals as a test run has time for."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.chaos import updates


@pytest.mark.slow
def test_a_run_goes_on_whoever_is_killed_or_frozen_in_the_middle_of_updates(capfd):
    """I5 and I7: SIGKILL and SIGSTOP at random moments, on real processes."""
    seed = random.randrange(1 << 32)
    transport = random.Random(seed).choice(updates.TRANSPORTS)
    code = updates.main(["--rounds", "4", "--transport", transport, "--seed", str(seed)])
    assert code == 0, capfd.readouterr()


OF_EPISODES = ["--faults", "6", "--kind", "kill", "--kind", "freeze", "--episodes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "trained"),
    [
        (["--faults", "8", "--everything", "1"], 100),
        ([*OF_EPISODES, "function"], 50),
        ([*OF_EPISODES, "command"], 50),
    ],
    ids=["everybody", "functions", "commands"],
)
def test_i1_i7_nothing_is_lost_or_left_over_by_a_run_that_is_broken_again_and_again(arguments, trained):
    """I1, I5 and I7: any process killed, frozen or delayed, disk and network gone for a while, all ended at once; and
    agents, workers and hosts of episodes in the middle of turns.
    """
    seed = random.randrange(1 << 32)
    command = [sys.executable, "-m", "tools.chaos", *arguments, "--seed", str(seed), "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["problems"] == []
    assert len(report["faults"]) == int(arguments[1]) + ("--everything" in arguments)
    assert report["figures"]["trained"] > trained

"""A whole run of the quickstart's task with another optimizer: the reward rises, from a real engine and learner."""

import subprocess
import sys
from pathlib import Path

import pytest
from quick import needs_vllm
from run_files import metrics

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "learner.groups_per_step": 8,
    "learner.steps": 20,
    "learner.optimizer": "muon",
    "rollout.concurrency": 64,
    "checkpoint.export_at_end": "false",
    "run.name": "learns",
}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_rises(tmp_path):
    # A few held-out problems for the evaluations.
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "1234+4321=", "answer": "5555"}\n' * 4)
    paths = {f"eval.{name}.data.path": few for name in ("heldout", "heldout_greedy")}
    given = {**SETTINGS, **paths, "run.dir": tmp_path}
    flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "tools.quickstart", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    rewards = [line["reward/mean"] for line in metrics(tmp_path / "learns", "train")]
    assert len(rewards) == SETTINGS["learner.steps"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, rewards

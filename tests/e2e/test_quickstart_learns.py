"""Whole runs of the quickstart's task in other ways of training: the reward rises, from a real engine and learner."""

import subprocess
import sys
from pathlib import Path

import pytest
from quick import needs_vllm
from run_files import metrics

from tools.quickstart.assets import ensure_assets
from tools.quickstart.experts import upcycle

ROOT = Path(__file__).parents[2]
SMALL = {
    "learner.groups_per_step": 8,
    "rollout.concurrency": 64,
    "checkpoint.export_at_end": "false",
}
FEW_STEPS = {"rollout.engine": "reference", "learner.steps": 6}
"""The reference engine takes many times as long as vLLM."""
TIME_SLICES = {"placement.share": "time_slice", **FEW_STEPS}
MUON = {"learner.optimizer": "muon", "learner.steps": 40, "learner.groups_per_step": 16}
"""Enough groups that the mean reward of a third of the steps differs by more than chance."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(folder, settings):
    """Train the quickstart's model, with a few held-out problems for the evaluations; returns the run's folder."""
    few = folder / "few.jsonl"
    few.write_text('{"prompt": "1234+4321=", "answer": "5555"}\n' * 4)
    paths = {f"eval.{name}.data.path": few for name in ("heldout", "heldout_greedy")}
    given = {**SMALL, **paths, "run.dir": folder, "run.name": "learns", **settings}
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
    return folder / "learns"


def test_a_mixture_of_experts_learns_from_the_routes_of_its_engine(tmp_path):
    folder = upcycle(ensure_assets().model, tmp_path / "experts")
    settings = {"model.path": folder, "learner.groups_per_step": 6, "learner.balance": 0.01, **FEW_STEPS}
    lines = metrics(run(tmp_path, settings), "train")
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[-1] + rewards[-2] > rewards[0] + rewards[1] + 0.1, rewards
    assert all(line["policy/routes_differ"] < 0.05 and line["loss/balance"] > 0 for line in lines)
    assert max(line.get("policy/engine_kl", 0.0) for line in lines) < 1e-4
    assert [line for line in lines if "policy/engine_kl" in line]


@pytest.mark.parametrize("settings", [pytest.param(MUON, marks=needs_vllm), TIME_SLICES], ids=["muon", "time slices"])
def test_the_reward_rises(tmp_path, settings):
    lines = metrics(run(tmp_path, settings), "train")
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == settings["learner.steps"]
    third = len(rewards) // 3
    assert sum(rewards[-third:]) > sum(rewards[:third]) + 0.05 * third, rewards
    if settings is TIME_SLICES:
        # The rank gave the GPU away after most steps, and waited to have it again.
        assert sum(line["time/take_gpu_s"] > 0.0 for line in lines) > len(lines) / 2

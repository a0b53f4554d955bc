"""Permanent failures in a whole run, every actor a process: a reward of one trajectory, the gradient of one group.

A group with a failed trajectory is quarantined (rollout.on_failed_trajectory). So is one with a gradient that is not
finite, or the run ends and names it (learner.on_nonfinite). The others are trained, each once.
"""

import json
import random
from contextlib import closing

import pytest
from run_files import groups, json_lines, metrics

from tools.bench.tiny_model import make_model
from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN_S = 280
SAMPLES, GROUPS = 4, 2
USERS = '''
import torch

def reward(*, prompt, completion, row):
    """In thirds; of some prompts the reward of some responses fails for ever, others have rewards a thousand times as
    large."""
    if row["fails"] and sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("this reward fails for ever")
    share = sum(c.isdigit() for c in completion) / max(1, len(completion))
    return (1000.0 if row["poisons"] else 1.0) * round(3 * share) / 3

def loss(batch):
    """Finite, but the gradient of large advantages is not."""
    large = batch.advantages.abs() > 100.0
    root = ((batch.logprobs - batch.logprobs.detach()).abs() + (~large).float()).sqrt()
    return torch.where(large, root, -batch.advantages * batch.logprobs), {}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    make_model(folder / "model")
    (folder / "users.py").write_text(USERS)
    return folder


def play(folder, name, *, fails=(), poisons=(), **sections):
    """Exit code, output and folder of a run. Prompts with these indices fail, or poison their gradient."""
    numbers = random.Random(0)
    rows = [
        {
            "prompt": f"{numbers.randint(10, 99)}+{numbers.randint(10, 99)}=",
            "fails": i in fails,
            "poisons": i in poisons,
        }
        for i in range(40)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": {"samples_per_step": 1000},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / f"{name}.jsonl"), "max_prompt_tokens": 12, "shuffle": False},
        "rollout": {
            "engine": "reference",
            "gpus_per_replica": 0,
            "samples_per_prompt": SAMPLES,
            "max_tokens": 12,
            "concurrency": 8,
            "max_attempts": 2,
            "retry_backoff_s": 0.01,
        },
        "reward": {"function": "users:reward"},
        "learner": {"groups_per_step": GROUPS, "steps": 5, "lr": 1e-3, "device": "cpu", "advantage": "dr_grpo"},
        "checkpoint": {"every_versions": 0},
    }
    (folder / name).mkdir()
    tree = {key: {**tree.get(key, {}), **sections.get(key, {})} for key in tree | sections}
    with closing(LiveRun(tree, folder / name, env={"PYTHONPATH": str(folder)})) as run:
        code = run.wait(RUN_S)
        assert run.left() == []
    return code, run.output, run.run_dir


def trained(run_dir):
    """Every trained group by uid, each once."""
    found = {group["uid"]: group for group in groups(run_dir)}
    assert len(found) == len(groups(run_dir))
    return found


def quarantined(run_dir):
    return {line["uid"]: line["reason"] for line in json_lines(run_dir / "quarantine.jsonl")}


def index_of(uid):
    return int(uid.partition("-")[2])


def test_a_permanent_failure_costs_its_group_and_the_run_continues(folder):
    fails = set(range(0, 40, 3))
    poisons = set(range(1, 40, 4)) - fails
    learner = {"loss": "users:loss", "on_nonfinite": "skip", "updates_per_batch": GROUPS}
    sections = {"learner": learner, "rollout": {"on_failed_trajectory": "quarantine_group"}}
    code, output, run_dir = play(folder, "skip", fails=fails, poisons=poisons, **sections)
    assert code == 0, output
    kept, left_out = trained(run_dir), quarantined(run_dir)
    assert not kept.keys() & left_out.keys()
    for indices, reported in ((fails, "this reward fails for ever"), (poisons, "the gradient norm of step")):
        reasons = [reason for uid, reason in left_out.items() if index_of(uid) in indices]
        assert reasons and all(reported in reason for reason in reasons)
    assert {index_of(uid) for uid in left_out} <= fails | poisons
    assert not any(index_of(uid) in poisons for uid in kept)
    assert all(len(group["trajectories"]) == SAMPLES for group in kept.values())
    for group in (group for uid, group in kept.items() if index_of(uid) in fails):
        assert not any(sum(map(ord, each["text"])) % 3 == 0 for each in group["trajectories"])
    lines = metrics(run_dir, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert len(kept) == lines[-1]["ledger/trained"]
    assert lines[-1]["rollout/dropped_trajectories"] == 0 < lines[-1]["rollout/failed_attempts"]


def test_a_gradient_that_is_not_finite_ends_the_run_and_its_group_is_named(folder):
    learner = {"loss": "users:loss", "on_nonfinite": "stop", "updates_per_batch": GROUPS}
    poisons = set(range(4, 40))
    code, output, run_dir = play(folder, "stop", poisons=poisons, learner=learner)
    assert code == 1, output
    reported = next(line for line in output.splitlines() if "gradient norm" in line)
    # An update has one group here.
    (uid,) = {uid.strip(" ).,") for uid in reported.partition("(groups ")[2].partition(")")[0].split(",")}
    assert index_of(uid) in poisons
    assert not any(index_of(each) in poisons for each in trained(run_dir))

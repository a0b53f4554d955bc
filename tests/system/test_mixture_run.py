"""A mixture of two sources over three epochs of each, killed as a whole by SIGKILL and resumed, at random."""

from __future__ import annotations

import json
import random
import secrets
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_files import groups, metrics
from run_settings import launched_run

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.messages.ledger import Ledger, position_of
from tools.live_run import LiveRun

SIZES = {"sums": 30, "words": 10}
STEPS, GROUPS = 30, 4
"""So many groups are three epochs of each source, at weights of 3 to 1."""


def tree_of(folder: Path, *, step_s: float) -> dict[str, Any]:
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name} {number}", "answer": str(number)} for number in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"name": "sums", "weight": 3.0, "path": str(folder / "sums.jsonl")},
        {
            "name": "words",
            "path": str(folder / "words.jsonl"),
            "reward": "constant",
            "reward_options": {"value": 5.0, "spread": 1.0},
        },
    ]
    tree = launched_run(
        run={"samples_per_step": GROUPS},
        learner={"steps": STEPS, "groups_per_step": GROUPS, "sim": {"step_s": step_s}},
        reward={"options": {"spread": 1.0}},
        checkpoint={"every_versions": 3, "export_at_end": False},
    )
    sets = {
        name: {"at_start": False, "data": {"path": str(folder / "words.jsonl"), "mixture_source": name}}
        for name in SIZES
    }
    return tree | {"data": {"source": sources}, "eval": sets}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_i1_a_killed_mixture_trains_each_prompt_once_in_each_epoch_of_its_source(tmp_path: Path, kills: int) -> None:
    # One kill is at the same step each time, so that a change is judged by its own faults.
    seed = secrets.randbits(32) if kills > 1 else 1
    print("seed", seed)
    steps = sorted(random.Random(seed).sample(range(2, STEPS - 2), kills))
    # Slow steps, so that the last kill comes before the end of the run.
    with closing(LiveRun(tree_of(tmp_path, step_s=0.8 if kills > 1 else 0.1), tmp_path)) as run:
        for step in steps:
            run.until(lambda step=step: run.step >= step, f"step {step}", 100)
            run.kill_everything()
            run.resume()
        assert run.wait(200) == 0, run.output
        run_dir = run.run_dir
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    ledger = Ledger.restore(read_state(newest.path).ledger, len(SIZES))
    trained = [ledger.of_source(number)["trained"] for number in range(len(SIZES))]
    assert trained == [90, 30]
    for number, size in enumerate(SIZES.values()):
        assert [ledger.concluded(number + 2 * epoch) for epoch in range(4)] == [size, size, size, 0]
    starts = {line["step"]: line["start"] for line in metrics(run_dir, "train")}
    last = [group for group in groups(run_dir) if group["start"] == starts[group["step"]]]
    uids = Counter(group["uid"] for group in last)
    assert max(uids.values()) == 1 and len(uids) == STEPS * GROUPS
    for group in last:
        name = list(SIZES)[position_of(group["uid"])[0] % 2]
        assert (group["source"], group["prompt"].split()[0]) == (name, name)
        # The words have a reward of their own.
        assert all((t["reward"] > 3.0) == (name == "words") for t in group["trajectories"])
    lines = [line for line in metrics(run_dir, "train") if line["start"] == starts[line["step"]]]
    for line in lines:
        words = line["source/words/trained"]
        assert abs(words - line["ledger/trained"] / 4) <= 4, "a step trains the groups that have come"
    assert (lines[-1]["source/sums/trained"], lines[-1]["source/words/trained"]) == (90, 30)
    assert {line.get("source/words/reward_mean", 5.0) // 1 for line in lines} <= {4.0, 5.0}
    assert lines[-1]["reward/signal_fraction"] == 1.0
    # The same prompts, scored by the reward of each source.
    means = {
        name: line[f"eval/{name}/mean"]
        for line in metrics(run_dir, "eval")
        for name in SIZES
        if f"eval/{name}/mean" in line
    }
    assert means["words"] > 4.0 > 2.0 > means["sums"]

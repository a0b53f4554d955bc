"""A run with warm steps and a supervised term: it begins with what the conversations teach, keeps it, and goes on after
it was killed with the same bits.
"""

import json

import pytest
from test_killed_run import figures, live, tokens
from test_parity import configuration, weights
from test_parity import folder as parity_folder  # noqa: F401

from asyncrl.checkpoint.contents import read_trainer_contents
from asyncrl.checkpoint.folder import CheckpointFolder

WARM, STEPS = 12, 6


def lines_of(run_dir, kind):
    every = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["kind"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_begins_warm_keeps_it_and_is_resumed_bit_for_bit(parity_folder, tmp_path):  # noqa: F811
    rows = [{"prompt": f"{number}+{number}=", "completion": "1a" * (1 + number % 4)} for number in range(10, 40)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = configuration(
        parity_folder,
        learner={"steps": STEPS},
        checkpoint={"every_versions": 2},
        sft={"data": str(tmp_path / "talk.jsonl"), "warm_steps": WARM, "weight": 0.5, "batch": 8, "lr": 1e-2},
    )
    whole = live(tree, tmp_path / "whole", [], PYTHONPATH=str(parity_folder))
    # Before the first checkpoint of a step: that of the warm steps is what it goes on from.
    resumed = live(tree, tmp_path / "resumed", [1], PYTHONPATH=str(parity_folder))
    warm, steps = lines_of(whole, "warm"), lines_of(whole, "train")
    assert [line["sft/warm_steps"] for line in warm] == list(range(1, WARM + 1))
    assert warm[-1]["loss/sft"] < 0.5 * warm[0]["loss/sft"]
    assert all(line["loss/sft"] < 0.5 * warm[0]["loss/sft"] for line in steps)
    assert steps[0]["sft/epochs"] == pytest.approx((WARM + 1) * 8 / 30)
    # Nothing was sampled before: the first responses are of the letters that the completions have.
    (first,) = (path for path in (whole / "samples").iterdir() if path.name == "step_000001.jsonl")
    groups = map(json.loads, first.read_text().splitlines())
    said = "".join(trajectory["text"] for group in groups for trajectory in group["trajectories"])
    assert sum(said.count(letter) for letter in "1a") > 0.8 * len(said) > 0
    # They are not taken again.
    assert [line["sft/warm_steps"] for line in lines_of(resumed, "warm")] == list(range(1, WARM + 1))
    newest = CheckpointFolder(resumed / "checkpoints").newest()
    assert read_trainer_contents(newest.path / "trainer").warm_steps == WARM
    assert tokens(resumed) == tokens(whole)
    assert figures(resumed) == figures(whole)
    assert weights(resumed) == weights(whole)

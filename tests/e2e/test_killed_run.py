"""A run that is killed as a whole and resumed.

On the reference engine with staleness.max = 0 it ends with the same weights and metrics, bit for bit, as one that was
never interrupted, and does not repeat its warm steps.
"""

import json
from contextlib import closing

import pytest
from parity import configuration, trained, weights
from run_files import groups, json_lines, metrics

from asyncrl.checkpoint.contents import read_state, read_trainer_contents
from asyncrl.checkpoint.folder import CheckpointFolder
from tools.live_run import LiveRun

TIMING = (
    *("time/", "perf/", "weights/", "rollout/tokens", "rollout/granted_length_mean", "staleness/limit", "buffer/"),
    "policy/probe_kl",
    "policy/drift",
    "policy/drift_worst",
)
"""Values that depend on when things happen, or number versions, which no run uses twice."""
STEPS, WARM = 8, 12


def live(tree, folder, kills, **environment):
    """Run to the end. At each step of ``kills`` everything is killed and resumed."""
    folder.mkdir()
    with closing(LiveRun(tree, folder, env=environment)) as run:
        for step in kills:
            run.until(lambda step=step: run.step >= step, f"step {step}", 200)
            run.kill_everything()
            run.resume()
        assert run.wait(250) == 0, run.output
        assert run.left() == []
        for path in CheckpointFolder(run.run_dir / "checkpoints").folder.iterdir():
            assert not path.name.startswith("."), "a partial checkpoint is left"
        assert not (run.run_dir / "private").exists()
        assert run.output.count("resuming ") == len(kills), run.output
    return run.run_dir


def figures(run_dir):
    """The metrics of the last start, by step."""
    return {
        line["step"]: {name: value for name, value in line.items() if name != "start" and not name.startswith(TIMING)}
        for line in metrics(run_dir, "train")
    }


def tokens(run_dir):
    """Groups trained in the last history, by step, without the numbers of versions."""
    starts = {line["step"]: line["start"] for line in metrics(run_dir, "train")}
    found = {}
    for group in groups(run_dir):
        if group["start"] == starts[group["step"]]:
            # Versions differ: a resumed run publishes under unused numbers.
            sampled = [
                ([(s["tokens"], s["logprobs"]) for s in t["sequences"]], t["reward"]) for t in group["trajectories"]
            ]
            found.setdefault(group["step"], []).append((group["uid"], sampled))
    return found


def ledger(run_dir):
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest.step == STEPS
    return read_state(newest.path).ledger


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_warm_steps_is_resumed_bit_for_bit(parity_folder, tmp_path):
    rows = [{"prompt": f"{number}+{number}=", "completion": "1a" * (1 + number % 4)} for number in range(10, 40)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = configuration(
        parity_folder,
        learner={"steps": STEPS},
        checkpoint={"every_versions": 2},
        sft={"data": str(tmp_path / "talk.jsonl"), "warm_steps": WARM, "weight": 0.2, "batch": 8, "lr": 1e-2},
    )
    whole = live(tree, tmp_path / "whole", [], PYTHONPATH=str(parity_folder))
    # The first kill is before the first checkpoint of a step: the run resumes from that of the warm steps.
    resumed = live(tree, tmp_path / "resumed", [1, 4], PYTHONPATH=str(parity_folder))
    warm, steps = metrics(whole, "warm"), metrics(whole, "train")
    assert [line["sft/warm_steps"] for line in warm] == list(range(1, WARM + 1))
    assert warm[-1]["loss/sft"] < 0.5 * warm[0]["loss/sft"]
    assert all(line["loss/sft"] < 0.5 * warm[0]["loss/sft"] for line in steps)
    assert steps[0]["sft/epochs"] == pytest.approx((WARM + 1) * 8 / 30)
    # Nothing was sampled before: the first responses have the letters of the completions.
    first = json_lines(whole / "samples" / "step_000001.jsonl")
    said = "".join(trajectory["text"] for group in first for trajectory in group["trajectories"])
    assert sum(said.count(letter) for letter in "1a") > 0.8 * len(said) > 0
    # The warm steps are not repeated.
    assert [line["sft/warm_steps"] for line in metrics(resumed, "warm")] == list(range(1, WARM + 1))
    newest = CheckpointFolder(resumed / "checkpoints").newest()
    assert read_trainer_contents(newest.path / "trainer").warm_steps == WARM
    assert tokens(resumed) == tokens(whole)
    assert figures(resumed) == figures(whole)
    assert weights(resumed) == weights(whole)
    assert ledger(resumed) == ledger(whole)
    assert sorted(trained(whole)) == list(range(1, STEPS + 1))

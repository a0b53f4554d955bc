"""A run that is killed as a whole and resumed: on the reference engine with staleness.max = 0 it ends with the same
weights and metrics, in every bit, as one that was never interrupted; with more staleness, with the same ledger (I1).
"""

import json

import pytest
from test_parity import configuration, trained, weights
from test_parity import folder as parity_folder  # noqa: F401

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder
from tools.live_run import LiveRun

TIMING = (
    *("time/", "perf/", "weights/", "rollout/tokens", "rollout/granted_length_mean", "staleness/limit", "buffer/"),
    "policy/probe_kl",
    "policy/drift",
    "policy/drift_worst",
)
"""What depends on when things happen, or numbers versions, which no run uses twice."""
STEPS = 8


def live(tree, folder, kills, **environment):
    """Run to the end; at each step of ``kills`` everything is killed and resumed."""
    folder.mkdir()
    run = LiveRun(tree, folder, env=environment)
    try:
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
    finally:
        run.close()
    return run.run_dir


def figures(run_dir):
    """The lines of the last start, by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in lines if line["kind"] == "train"}
    return {
        step: {name: value for name, value in line.items() if name != "start" and not name.startswith(TIMING)}
        for step, line in found.items()
    }


def tokens(run_dir):
    """What was trained in the last history, by step, without the numbers of versions."""
    starts = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "train":
            starts[line["step"]] = line["start"]
    found = {}
    for path in (run_dir / "samples").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            if line["start"] == starts[line["step"]]:
                # Versions differ: a run that goes on publishes under numbers that were never used.
                sampled = [
                    ([(s["tokens"], s["logprobs"]) for s in t["sequences"]], t["reward"]) for t in line["trajectories"]
                ]
                found.setdefault(line["step"], []).append((line["uid"], sampled))
    return found


def ledger(run_dir):
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest.step == STEPS
    return read_state(newest.path).ledger


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_equals_one_that_was_never_interrupted_bit_for_bit(parity_folder, tmp_path):  # noqa: F811
    tree = configuration(parity_folder, learner={"steps": STEPS}, checkpoint={"every_versions": 2})
    whole = live(tree, tmp_path / "whole", [], PYTHONPATH=str(parity_folder))
    resumed = live(tree, tmp_path / "resumed", [3], PYTHONPATH=str(parity_folder))
    assert tokens(resumed) == tokens(whole)
    assert figures(resumed) == figures(whole)
    assert weights(resumed) == weights(whole)
    assert ledger(resumed) == ledger(whole)
    assert sorted(trained(whole)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_i1_with_staleness_a_resumed_run_ends_with_the_same_ledger(tmp_path):
    """The groups of the run are whole epochs, so whatever comes when, the same prompts are to be trained."""
    tree = {
        "run": {"samples_per_step": 1000},
        "data": {"source": "synthetic", "size": 24},
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "gpus_per_replica": 0,
            "samples_per_prompt": 2,
            "concurrency": 8,
            "max_tokens": 64,
            "sim": {"length_median": 24.0, "decode_step_s": 0.01, "load_s": 0.02},
        },
        "reward": {"function": "constant", "workers": 1},
        "learner": {
            "backend": "sim",
            "steps": STEPS,
            "groups_per_step": 6,
            "dynamic_sampling": False,
            "sim": {"step_s": 0.5},
        },
        "staleness": {"max": 2},
        "checkpoint": {"every_versions": 2},
    }
    whole = live(tree, tmp_path / "whole", [])
    resumed = live(tree, tmp_path / "resumed", [2, 5])
    assert ledger(resumed) == ledger(whole)
    uids = [uid for groups in tokens(resumed).values() for uid, _ in groups]
    assert len(uids) == len(set(uids)) == 6 * STEPS

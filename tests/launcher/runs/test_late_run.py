"""The staleness bound of single tokens in whole simulated runs of the command, with every real actor in its process."""

import json

import pytest

LONG_TAIL = (
    *("--rollout.sim.length", "lognormal", "--rollout.sim.length_median", "8.0", "--rollout.sim.length_sigma", "1.6"),
    *("--learner.sim.step_s", "0.01"),
)
STALENESS = ("--staleness.max", "1", "--run.samples_per_step", "100")


@pytest.mark.parametrize("late", ["wait", "requeue"])
def test_no_token_that_is_trained_is_staler_than_the_limit(launch, late):
    run = launch(*LONG_TAIL, *STALENESS, "--staleness.late", late)
    code, shown = run.end()
    assert code == 0, shown
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    uids = []
    for line in lines:
        # Trained on the version before the one that it made.
        version = line["weights/version"] - 1
        samples = run.run_dir / "samples" / f"step_{line['step']:06d}.jsonl"
        for group in map(json.loads, samples.read_text().splitlines()):
            uids.append(group["uid"])
            spans = [
                span
                for trajectory in group["trajectories"]
                for sequence in trajectory["sequences"]
                for span in sequence["spans"]
            ]
            if not line["staleness/masked_tokens"]:
                assert all(version - sampled <= 1 for sampled, *_ in spans)
    assert len(set(uids)) == len(uids) == 4 * len(lines)
    assert max(line["staleness/token_max"] for line in lines) <= 1
    if late == "wait":
        assert not any(line["staleness/masked_tokens"] for line in lines)
        assert sum(line["staleness/waited_groups"] for line in lines) > 0
    else:
        assert sum(line["staleness/requeued_groups"] for line in lines) > 0

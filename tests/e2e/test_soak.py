"""Updates of the real vLLM while it generates: two kinds at a small size, all kinds under ``make soak``.

A run has two rollouters, a version a step, and ``weights.verify = "full"``.
"""

import os
from collections import defaultdict
from itertools import product

import pytest
from quick import needs_vllm
from run_files import assert_spans_cover, groups

from tools.bench.tiny_model import make_model
from tools.live_run import LiveRun

STEPS = int(os.environ.get("ASYNCRL_SOAK_STEPS", "6"))
"""Versions that both rollouters load after the first one that both served."""
ALL = list(product(("gloo", "shm", "stream"), ("abort_resume", "keep", "drain")))
CHOSEN = ALL if "ASYNCRL_SOAK_STEPS" in os.environ else [("gloo", "keep"), ("stream", "abort_resume")]
REPLICAS, STALENESS = 2, 4
RUN_S = 900.0
PROBE_KL = 1e-8
"""Largest divergence (nats) that rounding makes in float32: log-probs apart by 1e-4."""


def configuration(transport, mode, model):
    return {
        "run": {"samples_per_step": 1000},
        "model": {"path": str(model)},
        "data": {"source": "synthetic", "size": 4096, "max_prompt_tokens": 64},
        "rollout": {
            "replicas": REPLICAS,
            "min_replicas": REPLICAS,
            "gpus_per_replica": 0,
            "samples_per_prompt": 4,
            "concurrency": 32,
            "max_tokens": 192,
            "on_update": mode,
            "stream_interval": 8,
            "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1},
        },
        "reward": {"function": "constant", "workers": 1, "options": {"value": 0.5, "spread": 0.5}},
        "learner": {"steps": 1_000_000, "groups_per_step": 4, "lr": 1e-4, "dynamic_sampling": False, "threads": 1},
        "weights": {"transport": transport, "verify": "full", "bucket_bytes": 1 << 20, "chunk_bytes": 1 << 18},
        "staleness": {"max": STALENESS},
        "checkpoint": {"export_at_end": False},
    }


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize(("transport", "mode"), CHOSEN)
def test_i3_i4_the_real_vllm_takes_a_version_per_step(tmp_path, transport, mode):
    """Spans cover every trajectory. After each update, all engines hold the weights of the learner, and equal ones."""
    make_model(tmp_path / "model")
    run = LiveRun(configuration(transport, mode, tmp_path / "model"), tmp_path)
    try:
        # A run starts with the first ready rollouter, so it can be some steps old when the second is ready.
        run.until(lambda: len(run.served()) == REPLICAS, "a version served by each rollouter", RUN_S)
        last = max(run.served().values()) + STEPS
        run.until(lambda: min(run.served().values()) >= last, f"version {last} served by each rollouter", RUN_S)
        run.stop()
    finally:
        run.close()
    trajectories = [trajectory for group in groups(run.run_dir) for trajectory in group["trajectories"]]
    for trajectory in trajectories:
        assert_spans_cover(trajectory)
    mixed = sum(len(trajectory["sequences"][0]["spans"]) > 1 for trajectory in trajectories)
    assert trajectories and (mixed == 0) == (mode == "drain"), f"{mixed} of {len(trajectories)} met an update"
    updates, checksums = run.lines("update"), defaultdict(set)
    for update in updates:
        checksums[update["weights/version"]].add(update["weights/checksum"])
    assert all(len(each) == 1 and all(each) for each in checksums.values()), checksums
    assert len(set.union(*checksums.values())) == len(checksums), "two versions have the same weights"
    assert all(abs(update["policy/probe_kl"]) <= PROBE_KL for update in updates)
    # A stopped run does not wait for its last updates.
    assert min(run.served().values()) >= run.step - STALENESS
    assert all(line.get("event") != "engine is replaced" for i in range(REPLICAS) for line in run.log(f"rollouter/{i}"))

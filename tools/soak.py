"""Update the real vLLM after every step, in every mode and by every transport, and check the run.

    python -m tools.soak
    python -m tools.soak --steps 50 --transport gloo --mode keep

A run has two rollouters and ``weights.verify = "full"``. The tool stops it when both serve a version that is
``--steps`` newer than the first that both served. Then it checks that

- the version spans of every trajectory are contiguous, in order and complete;
- all engines held the same weights after each update: equal checksums, and the learner's probe within rounding;
- both rollouters reached the last version, and no engine was restarted.

It prints one line a run, then JSON. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools import kept
from tools.bench.tiny_model import make_model
from tools.chaos.audit import covered
from tools.live_run import LiveRun, RunEnded, with_keys

SUMMARY = "Run the real vLLM through an update after every step, and look at the result."
MODES = ("abort_resume", "keep", "drain")
TRANSPORTS = ("gloo", "shm", "stream")
REPLICAS = 2
STALENESS = 4
RUN_S = 900.0
PROBE_KL = 1e-8
"""Largest divergence (nats) that rounding makes in float32: log-probs apart by 1e-4."""


def configuration(transport: str, mode: str, model: Path) -> dict[str, Any]:
    """Return a run with a version a step, without an end."""
    keys = {
        "run.samples_per_step": 1000,
        "model.path": str(model),
        "data": {"source": "synthetic", "size": 4096, "max_prompt_tokens": 64},
        "rollout.replicas": REPLICAS,
        "rollout.min_replicas": REPLICAS,
        "rollout.gpus_per_replica": 0,
        "rollout.samples_per_prompt": 4,
        "rollout.concurrency": 32,
        "rollout.max_tokens": 192,
        "rollout.on_update": mode,
        "rollout.stream_interval": 8,
        "rollout.vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1},
        "reward": {"function": "constant", "workers": 1, "options": {"value": 0.5, "spread": 0.5}},
        "learner": {"steps": 1_000_000, "groups_per_step": 4, "lr": 1e-4, "dynamic_sampling": False, "threads": 1},
        "weights": {"transport": transport, "verify": "full", "bucket_bytes": 1 << 20, "chunk_bytes": 1 << 18},
        "staleness.max": STALENESS,
        "checkpoint.export_at_end": False,
    }
    return with_keys({}, keys)


def follow(run: LiveRun, steps: int) -> None:
    """Stop a run when both rollouters are ``steps`` versions further. Raises RunEnded or TimeoutError."""
    # A run starts with the first ready rollouter, so it can be some steps old when the second is ready.
    run.until(lambda: len(run.served()) == REPLICAS, "a version served by each rollouter", RUN_S)
    last = max(run.served().values()) + steps
    run.until(lambda: min(run.served().values()) >= last, f"version {last} served by each rollouter", RUN_S)
    run.stop()


def problems_of(run: LiveRun, mode: str) -> tuple[list[str], dict[str, float]]:
    """Return the problems and the numbers of the run."""
    problems = []
    trajectories = mixed = 0
    for path in sorted((run.run_dir / "samples").glob("step_*")):
        for group in map(json.loads, path.read_text().splitlines()):
            for trajectory in group["trajectories"]:
                trajectories += 1
                [sequence] = trajectory["sequences"]
                mixed += len(sequence["spans"]) > 1
                if not covered(sequence):
                    problems.append(f"{group['uid']}: {sequence['spans']} of {len(sequence['tokens'])} tokens")
    updates = run.lines("update")
    if not trajectories or (mixed > 0) == (mode == "drain"):
        problems.append(f"{mixed} of {trajectories} trajectories met an update")
    checksums: dict[int, set[str]] = defaultdict(set)
    for update in updates:
        checksums[update["weights/version"]].add(update["weights/checksum"])
    problems += [f"version {v}: engines differ: {c}" for v, c in checksums.items() if len(c) > 1 or not all(c)]
    if len(set.union(*checksums.values())) != len(checksums):
        problems.append("two versions have the same weights")
    drifts = [abs(u["policy/probe_kl"]) for u in updates if u.get("policy/probe_kl") is not None]
    if len(drifts) != len(updates) or max(drifts) > PROBE_KL:
        problems.append(f"{len(drifts)} of {len(updates)} updates were probed, the worst was off by {max(drifts):.2g}")
    # A stopped run does not wait for its last updates.
    if min(run.served().values()) < run.step - STALENESS:
        problems.append(f"at the end {run.served()} is served, of {run.step} versions")
    replaced = sum(
        line.get("event") == "engine is replaced" for i in range(REPLICAS) for line in run.log(f"rollouter/{i}")
    )
    if replaced:
        problems.append(f"{replaced} engines were restarted")
    ways = [update["weights/transport"] for update in updates]
    figures = {
        "trajectories": trajectories,
        "mixed_fraction": mixed / max(1, trajectories),
        "updates": len(updates),
        **{f"updates_{way}": ways.count(way) for way in sorted(set(ways))},
        "stall_s_median": median(u["weights/stall_s"] for u in updates),
        "load_s_median": median(u["weights/load_s"] for u in updates),
        "probe_kl_max": max(drifts, default=0.0),
    }
    return problems, figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=SUMMARY)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: all")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    chosen = parser.parse_args(arguments)
    failed = False
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as name:
        model = Path(name) / "model"
        make_model(model)
        for transport in chosen.transport or TRANSPORTS:
            for mode in chosen.mode or MODES:
                folder = Path(name) / f"{transport}-{mode}"
                folder.mkdir(parents=True)
                run = LiveRun(configuration(transport, mode, model), folder)
                try:
                    follow(run, chosen.steps)
                    problems, figures = problems_of(run, mode)
                except (RunEnded, TimeoutError) as error:
                    problems, figures = [str(error)], {}
                finally:
                    run.close()
                found[f"{transport}/{mode}"] = figures
                failed |= bool(problems)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"{transport}/{mode}: {'FAILED' if problems else 'holds'}: {shown}", flush=True)
                for problem in problems[:10]:
                    print(f"  {problem}", flush=True)
    print(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(kept.run(main))

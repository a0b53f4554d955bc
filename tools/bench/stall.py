"""``python -m tools.bench stall``: generation time lost to an update, by what becomes of the requests in flight.

The same simulated run (long-tailed lengths, a version a step) under ``abort_resume``, ``keep`` and ``drain``. An abort
costs the prefill of what was held, ``keep`` with recomputation the same; a drain waits for the longest response in
flight. The ratios are against ``abort_resume``.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from tools.bench.processes import lines_of_run
from tools.bench.report import Report
from tools.live_run import simulated

MODES = ("abort_resume", "keep", "drain")
RUN_S = 600.0


def configuration(mode: str, steps: int) -> dict[str, Any]:
    """Two replicas of 32 requests each; a step takes a second and a half."""
    return simulated(
        {
            "data.size": 4096,
            "rollout.replicas": 2,
            "rollout.samples_per_prompt": 4,
            "rollout.concurrency": 32,
            "rollout.max_tokens": 1024,
            "rollout.on_update": mode,
            "rollout.stream_interval": 16,
            "rollout.sim.length": "lognormal",
            "rollout.sim.length_median": 96.0,
            "rollout.sim.length_sigma": 1.0,
            "rollout.sim.decode_step_s": 0.008,
            "rollout.sim.decode_step_per_request_s": 0.0001,
            "rollout.sim.load_s": 0.1,
            "reward.options": {"value": 0.5, "spread": 0.5},
            "learner.steps": steps,
            "learner.groups_per_step": 16,
            "learner.sim": {"step_s": 1.0, "publish_bytes": 1 << 20},
            "weights.transport": "shm",
            "staleness.max": 4,
        }
    )


def measure(report: Report, *, steps: int = 20) -> None:
    report.settings |= {"steps": steps, "replicas": 2, "load_s": 0.1}
    stalls: dict[str, float] = {}
    for mode in MODES:
        lines = lines_of_run(configuration(mode, steps), RUN_S)
        # The first update of an engine loses nothing: there was nothing to lose.
        updates = [line for line in lines["update"] if line["weights/version"] > 0]
        rate = mean(line["rollout/tokens_per_s"] for line in lines["train"][2:])
        stall = [line["weights/stall_s"] for line in updates]
        stalls[mode] = median(stall)
        report.figures[mode] = {
            "updates": len(updates),
            "stall_s": {"median": median(stall), "mean": mean(stall), "max": max(stall)},
            "load_s": {"median": median(line["weights/load_s"] for line in updates)},
            "tokens_per_s": rate,
        }
        report.say(
            f"{mode:14} stall median {median(stall):.3f} s, mean {mean(stall):.3f} s, longest {max(stall):.3f} s "
            f"over {len(updates)} updates; {rate:.0f} tokens/s"
        )
    report.ratios |= {f"stall_{mode}_vs_abort_resume": stalls[mode] / stalls["abort_resume"] for mode in MODES[1:]}

"""``python -m tools.bench overlap``: the throughput of the whole system against max(T_generate, T_train).

Whole simulated runs, started with asyncrl-launch: every actor a process of its own, on real sockets and real time.
Only the engines' decoding and the learner's training are timing models. T_generate, the time to generate a step's
groups, is measured by a run whose learner takes no time and whose staleness limit never refuses a group; T_train is
the simulated step. A run's time per step is taken between the end of its warm-up and the beginning of its end, when
no more groups are leased than the run still needs. Responses are the same in all runs: lengths depend on seed and
prompt alone.

One run for each figure: each is a mean over as many steps as there would be pairs.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from tools.bench.processes import lines_of_run
from tools.bench.report import Report, Target
from tools.live_run import simulated

CONCURRENCY = 16
"""Calls in an engine: both hold half a step, so that generation alone makes no token a version old on average."""
WARM_UP_STEPS = 12
LAST_STEPS = 4
RATIOS = (0.5, 1.0, 2.0)
"""T_train / T_generate."""
STALENESS_MAX = 4
UNBOUNDED = 64
"""A limit that refuses nothing here."""
TARGET_SHARE = 0.95
TARGET_STALENESS = 2.5
TARGET_ADAPTED = 0.98
ADAPTED_MAX = 8
RUN_S = 1200.0


def config(*, train_s: float, staleness_max: int, adapt: bool, steps: int) -> dict[str, Any]:
    """Two engines and 64 trajectories of lognormal length (sigma 1) a step."""
    return simulated(
        {
            "run.samples_per_step": 0,
            "data.size": 8192,
            "rollout.replicas": 2,
            "rollout.samples_per_prompt": 8,
            "rollout.concurrency": CONCURRENCY,
            "rollout.max_tokens": 1024,
            "rollout.sim.length": "lognormal",
            "rollout.sim.length_median": 128.0,
            "rollout.sim.length_sigma": 1.0,
            "rollout.sim.decode_step_s": 0.002,
            "rollout.sim.decode_step_per_request_s": 0.00002,
            "rollout.sim.load_s": 0.02,
            "learner.steps": steps,
            "learner.groups_per_step": 8,
            "learner.sim.step_s": train_s,
            "staleness.max": staleness_max,
            "staleness.adapt": adapt,
        }
    )


def measure(report: Report, *, steps: int = 48) -> None:
    """``steps`` are measured in each run."""
    report.settings |= {
        "system": "asyncrl-launch: every actor a process, real sockets, real time; engine and learner simulated",
        "measured_steps": steps,
        "warm_up_steps": WARM_UP_STEPS,
        "staleness_max": STALENESS_MAX,
    }
    generation = one_run(report, "generation_only", steps, train_s=0.0, staleness_max=UNBOUNDED, adapt=False)
    generate_s = report.figures["t_generate_s"] = generation["step_s"]
    for ratio in RATIOS:
        train_s = ratio * generate_s
        name = f"overlap_{ratio:g}"
        run = one_run(report, name, steps, train_s=train_s, staleness_max=STALENESS_MAX, adapt=True)
        report.ratio(name, max(generate_s, train_s) / run["step_s"], Target(">=", TARGET_SHARE))
        report.ratio(f"{name}_token_staleness", run["token_staleness"], Target("<=", TARGET_STALENESS))
    train_s = 2 * generate_s
    fixed = one_run(report, "eta_8_fixed", steps, train_s=train_s, staleness_max=ADAPTED_MAX, adapt=False)
    adapted = one_run(report, "eta_8_adapted", steps, train_s=train_s, staleness_max=ADAPTED_MAX, adapt=True)
    report.ratio("eta_8_adapted", fixed["step_s"] / adapted["step_s"], Target(">=", TARGET_ADAPTED))
    report.ratio("eta_8_adapted_token_staleness", adapted["token_staleness"], Target("<=", TARGET_STALENESS))


def one_run(
    report: Report, name: str, steps: int, *, train_s: float, staleness_max: int, adapt: bool
) -> dict[str, float]:
    """Launch a run and read its metrics. Raises RunEnded."""
    chosen = config(train_s=train_s, staleness_max=staleness_max, adapt=adapt, steps=WARM_UP_STEPS + steps + LAST_STEPS)
    run = summarize(lines_of_run(chosen, RUN_S)["train"])
    report.figures[name] = {"t_train_s": train_s, "staleness_max": staleness_max, "adapt": adapt, **run}
    report.say(
        f"{name:16} T_train {train_s:.3f} s, eta {staleness_max}{' adapted' if adapt else ''}: "
        + ", ".join(f"{figure} {value:.3f}" for figure, value in run.items())
    )
    return run


def summarize(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the measured steps: times (s), staleness of all trained tokens and working limit (versions)."""
    trained = lines[WARM_UP_STEPS:-LAST_STEPS]
    tokens = sum(line["rollout/length_mean"] for line in trained)
    return {
        "step_s": fmean(line["time/step_s"] for line in trained),
        "train_s": fmean(line["time/train_s"] for line in trained),
        "wait_for_groups_s": fmean(line["time/wait_for_groups_s"] for line in trained),
        "token_staleness": sum(line["staleness/token_mean"] * line["rollout/length_mean"] for line in trained) / tokens,
        "limit": fmean(line["staleness/limit"] for line in trained),
        "steps": len(trained),
    }

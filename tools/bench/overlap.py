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

from dataclasses import asdict, dataclass
from typing import Any

from tools.bench.processes import run_to_end
from tools.bench.report import Report, Target

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


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run."""

    step_s: float
    """Mean seconds of a step."""
    train_s: float
    """Mean seconds of training in a step."""
    wait_for_groups_s: float
    """Mean seconds of the learner's wait for groups in a step."""
    token_staleness: float
    """Mean over all trained tokens, in versions."""
    limit: float
    """Mean working limit, in versions."""
    steps: int


def config(*, train_s: float, staleness_max: int, adapt: bool, steps: int) -> dict[str, Any]:
    """Two engines and 64 trajectories of lognormal length (sigma 1) a step."""
    return {
        "run": {"samples_per_step": 0},
        "data": {"source": "synthetic", "size": 8192},
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "gpus_per_replica": 0,
            "samples_per_prompt": 8,
            "concurrency": CONCURRENCY,
            "max_tokens": 1024,
            "sim": {
                "length": "lognormal",
                "length_median": 128.0,
                "length_sigma": 1.0,
                "decode_step_s": 0.002,
                "decode_step_per_request_s": 0.00002,
                "load_s": 0.02,
            },
        },
        "reward": {"function": "constant", "workers": 1},
        "learner": {
            "backend": "sim",
            "steps": steps,
            "groups_per_step": 8,
            "dynamic_sampling": False,
            "sim": {"step_s": train_s},
        },
        "staleness": {"max": staleness_max, "adapt": adapt},
        "checkpoint": {"export_at_end": False},
        "log": {"level": "warning"},
    }


def measure(report: Report, *, steps: int) -> None:
    """Fill the report; ``steps`` are measured in each run."""
    report.settings |= {
        "system": "asyncrl-launch: every actor a process, real sockets, real time; engine and learner simulated",
        "measured_steps": steps,
        "warm_up_steps": WARM_UP_STEPS,
        "staleness_max": STALENESS_MAX,
    }
    generation = one_run(report, "generation_only", steps, train_s=0.0, staleness_max=UNBOUNDED, adapt=False)
    generate_s = generation.step_s
    report.figures["t_generate_s"] = generate_s
    for ratio in RATIOS:
        train_s = ratio * generate_s
        name = f"overlap_{ratio:g}"
        run = one_run(report, name, steps, train_s=train_s, staleness_max=STALENESS_MAX, adapt=True)
        report.ratio(name, max(generate_s, train_s) / run.step_s, Target(">=", TARGET_SHARE))
        report.ratio(f"{name}_token_staleness", run.token_staleness, Target("<=", TARGET_STALENESS))
    train_s = 2 * generate_s
    fixed = one_run(report, "eta_8_fixed", steps, train_s=train_s, staleness_max=ADAPTED_MAX, adapt=False)
    adapted = one_run(report, "eta_8_adapted", steps, train_s=train_s, staleness_max=ADAPTED_MAX, adapt=True)
    report.ratio("eta_8_adapted", fixed.step_s / adapted.step_s, Target(">=", TARGET_ADAPTED))
    report.ratio("eta_8_adapted_token_staleness", adapted.token_staleness, Target("<=", TARGET_STALENESS))


def one_run(report: Report, name: str, steps: int, *, train_s: float, staleness_max: int, adapt: bool) -> Run:
    """Launch a run and read its metrics. Raises ActorFailed."""
    chosen = config(train_s=train_s, staleness_max=staleness_max, adapt=adapt, steps=WARM_UP_STEPS + steps + LAST_STEPS)
    run = summarize(run_to_end(chosen, RUN_S)["train"])
    report.figures[name] = {"t_train_s": train_s, "staleness_max": staleness_max, "adapt": adapt, **asdict(run)}
    report.say(
        f"{name:16} T_train {train_s:.3f} s, eta {staleness_max}{' adapted' if adapt else ''}: step {run.step_s:.3f} s "
        f"(waits {run.wait_for_groups_s:.3f} s), token staleness {run.token_staleness:.2f}, limit {run.limit:.2f}"
    )
    return run


def summarize(lines: list[dict[str, Any]]) -> Run:
    """Means over the measured steps."""
    trained = lines[WARM_UP_STEPS:-LAST_STEPS]

    def mean(key: str) -> float:
        return float(sum(line[key] for line in trained)) / len(trained)

    tokens = sum(line["rollout/length_mean"] for line in trained)
    return Run(
        step_s=mean("time/step_s"),
        train_s=mean("time/train_s"),
        wait_for_groups_s=mean("time/wait_for_groups_s"),
        token_staleness=sum(line["staleness/token_mean"] * line["rollout/length_mean"] for line in trained) / tokens,
        limit=mean("staleness/limit"),
        steps=len(trained),
    )

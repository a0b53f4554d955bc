"""``python -m tools.bench quickstart``: seconds until the quickstart's policy is right on held-out problems, vs TRL's.

Both sides train the same model on the same prompts with the same learning rate, responses a step and cores; their runs
take turns. Seconds are those of the steps alone, from the first to the one whose weights are right often enough:
starts, and the writing of TRL's weights, are left out, and so are evaluations, which are made afterwards by one
function for both. Between two versions that were kept, accuracy is taken to rise evenly.

Lengths of responses are nearly equal, or lognormal with sigma 1: then dots follow each solution, and a side that waits
for the longest response of a step, or computes with padding, pays for it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Literal

from asyncrl.config.load import validate_config
from tools.asset_cache import Assets
from tools.bench.learner import TRL
from tools.bench.learner_batch import trl_settings
from tools.bench.processes import environment, without_python_settings
from tools.bench.report import Report, Target
from tools.live_run import quickstart, run_to_end
from tools.quickstart.assets import ensure_assets
from tools.quickstart.settings import LOGNORMAL, Settings
from tools.quickstart.task import DOT

EVERY = 5
"""Steps between two versions whose accuracy is known."""
SAMPLES = 4
"""Samples of each held-out problem."""
SEEDS = (1, 2, 3)
RUN_S = 1800.0


@dataclass(frozen=True, slots=True)
class Task:
    """The quickstart's task in one of its lengths."""

    settings: Settings
    keys: Mapping[str, Any]
    """Configuration keys in which a run differs from the quickstart."""
    target: float
    """TRL's seconds over ours."""


TASKS = {
    "equal": Task(Settings(), {}, 1.0),
    "lognormal": Task(
        LOGNORMAL,
        {
            "rollout.max_tokens": LOGNORMAL.positions - 16,
            "rollout.vllm.cpu_kv_cache_bytes": 256 << 20,
            "reward.options.pattern": rf";(\d+)\{DOT}*$",
        },
        1.5,
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A version: the cost of all steps up to it, in seconds or tokens, and its share of right samples."""

    step: int
    cost: float
    accuracy: float


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """TRL's seconds over ours: 0 where ours alone never got there, inf where TRL's alone did not, None for neither."""
    if ours is None:
        return None if theirs is None else 0.0
    return math.inf if theirs is None else theirs / ours


def cost_until(accuracy: float, points: Sequence[Point]) -> float | None:
    """Cost at which the line through the points first is at ``accuracy``; None if it never is."""
    before = None
    for point in points:
        if point.accuracy >= accuracy:
            if before is None:
                return point.cost
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.cost + share * (point.cost - before.cost)
        before = point
    return None


def race(
    report: Report,
    sides: Mapping[str, Callable[[Path, int], Sequence[Point]]],
    seeds: Sequence[int],
    accuracy: float,
    unit: str,
) -> list[dict[str, float | None]]:
    """The cost of each side until ``accuracy``, for each seed. A side gets an empty folder and the seed.

    The sides take turns, in alternating order.
    """
    reached = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        for at, seed in enumerate(seeds):
            costs = {}
            for side in list(sides) if at % 2 == 0 else reversed(list(sides)):
                folder = Path(name) / f"{side}-{seed}"
                folder.mkdir()
                points = sides[side](folder, seed)
                cost = costs[side] = cost_until(accuracy, points)
                curve = [[point.step, round(point.cost, 3), round(point.accuracy, 4)] for point in points]
                report.figures[f"{side}_seed_{seed}"] = {unit: cost, f"step_{unit}_accuracy": curve}
                when, last = "never" if cost is None else f"after {cost:,.1f} {unit}", points[-1]
                report.say(
                    f"{side:8} seed {seed}: there {when}; {last.cost / last.step:,.3f} {unit} a step, "
                    f"{last.accuracy:.3f} at the end"
                )
            reached.append(costs)
    return reached


def report_median(report: Report, name: str, ratios: Sequence[float | None], target: Target) -> None:
    """Add the median over the pairs that have a ratio."""
    known = [ratio for ratio in ratios if ratio is not None]
    if known:
        report.say(f"{name}: {', '.join(f'{ratio:.2f}' for ratio in known)}")
        report.ratio(name, median(known), target)
    else:
        report.say(f"{name}: no pair of runs got there")


def measure(
    report: Report,
    *,
    vs: Literal["trl"],
    lengths: Literal["equal", "lognormal"] = "equal",
    seed: tuple[int, ...] = SEEDS,
    accuracy: float = 0.8,
    steps: int = 40,
) -> None:
    """Raises RuntimeError or RunEnded when a run fails."""
    python, task = environment(vs, TRL), TASKS[lengths]
    assets = ensure_assets(task.settings)
    report.settings |= {"lengths": lengths, "accuracy": accuracy, "steps": steps, "every": EVERY}
    sides = {"asyncrl": partial(ours, assets, task.keys, steps), "trl": partial(trl, python, assets, task.keys, steps)}
    reached = race(report, sides, seed, accuracy, "seconds")
    ratios = [ratio(each["asyncrl"], each["trl"]) for each in reached]
    report_median(report, f"quickstart_{lengths}_vs_trl", ratios, Target(">=", task.target))


def ours(assets: Assets, keys: Mapping[str, Any], steps: int, folder: Path, seed: int) -> list[Point]:
    """One run by asyncrl-launch, with a checkpoint wherever accuracy is to be known."""
    evals = {f"eval.{of}.{when}": False for of in ("heldout", "heldout_greedy") for when in ("at_start", "at_end")}
    checkpoints = {"every_versions": EVERY, "keep_every_steps": EVERY}
    further = {"run.seed": seed, "learner.steps": steps, "checkpoint": checkpoints, **keys, **evals}
    run = run_to_end(quickstart(assets, further), folder, RUN_S)
    seconds = [line["time/step_s"] for line in run.lines("train")]
    seconds[0] -= waited_for_engine(json.loads((run.run_dir / "trace" / "trace-001.json").read_text())["traceEvents"])
    for step in range(EVERY, steps + 1, EVERY):
        export = [str(run.run_dir), str(folder / f"v{step}"), "--version", str(step)]
        run_command([sys.executable, "-m", "asyncrl.cli.export", *export])
    return _points(assets, folder, seconds)


def waited_for_engine(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that the first step waited before the engine had started; ``events`` of a trace (observe/trace.py)."""
    waited = min(event["ts"] for event in events if event["name"] == "wait for groups")
    generated = min(event["ts"] for event in events if event["name"].startswith("generate v"))
    return max(0.0, float(generated - waited) / 1e6)


def trl(python: Path, assets: Assets, keys: Mapping[str, Any], steps: int, folder: Path, seed: int) -> list[Point]:
    """One run of GRPOTrainer, with the settings of the quickstart's file."""
    config = validate_config(quickstart(assets, keys))
    settings = trl_settings(config) | {
        "seed": seed,
        "steps": steps,
        "every": EVERY,
        "threads": 2,
        "pattern": config.reward.options["pattern"],
    }
    script = str(Path(__file__).with_name("trl_side.py"))
    places = [str(assets.model), str(assets.train), str(folder)]
    command = [str(python), "-I", script, "quickstart", *places, json.dumps(settings)]
    run_command(command, without_python_settings())
    return _points(assets, folder, json.loads((folder / "steps.json").read_text()))


def run_command(command: Sequence[str], variables: dict[str, str] | None = None) -> None:
    """Run a command. Raises RuntimeError with the end of its output if it fails."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    ended = subprocess.run(command, stdout=pipe, stderr=both, text=True, timeout=RUN_S, env=variables)
    if ended.returncode != 0:
        raise RuntimeError(f"exit code {ended.returncode} of {' '.join(command[:4])}:\n{ended.stdout[-2000:]}")


def _points(assets: Assets, folder: Path, seconds: Sequence[float]) -> list[Point]:
    passed = [0.0, *accumulate(seconds)]
    kept = {0: assets.model} | {step: folder / f"v{step}" for step in range(EVERY, len(seconds) + 1, EVERY)}
    return [Point(step, passed[step], heldout_accuracy(assets, model)) for step, model in kept.items()]


def heldout_accuracy(assets: Assets, model: Path) -> float:
    """Share of right samples at temperature 1, ``SAMPLES`` of each held-out problem; the same seed for every model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tools.quickstart.model import solved_share
    from tools.quickstart.task import Problem

    rows = [json.loads(line) for line in assets.heldout.read_text().splitlines()]
    problems = [Problem(*map(int, row["prompt"].rstrip("=").split("+"))) for row in rows] * SAMPLES
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.model)
    torch.manual_seed(0)
    return solved_share(policy.eval(), tokenizer, problems)

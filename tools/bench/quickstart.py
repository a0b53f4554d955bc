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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.config.load import load_config
from tools.asset_cache import Assets
from tools.bench.learner import TRL
from tools.bench.processes import environment, without_python_settings
from tools.bench.report import Report, Target
from tools.quickstart.__main__ import CACHE, CONFIG, launch_command
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
    keys: Mapping[str, str]
    """Configuration keys in which a run differs from the quickstart."""
    target: float
    """TRL's seconds over ours."""


TASKS = {
    "equal": Task(Settings(), {}, 1.0),
    "lognormal": Task(
        LOGNORMAL,
        {
            "rollout.max_tokens": str(LOGNORMAL.positions - 16),
            "rollout.vllm.cpu_kv_cache_bytes": str(256 << 20),
            "reward.options.pattern": rf";(\d+)\{DOT}*$",
        },
        1.5,
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A version: the seconds of all steps up to it, and its share of right samples."""

    step: int
    seconds: float
    accuracy: float


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """TRL's seconds over ours: 0 where ours alone never got there, inf where TRL's alone did not, None for neither."""
    if ours is None:
        return None if theirs is None else 0.0
    return math.inf if theirs is None else theirs / ours


def seconds_until(accuracy: float, points: Sequence[Point]) -> float | None:
    """Seconds at which the line through the points first is at ``accuracy``; None if it never is."""
    before = None
    for point in points:
        if point.accuracy >= accuracy:
            if before is None:
                return point.seconds
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def measure(report: Report, *, vs: str, lengths: str, seed: list[int] | None, accuracy: float, steps: int) -> None:
    """Fill the report with the task ``lengths`` of TASKS; ``vs`` is ``trl``. Raises RuntimeError when a run fails."""
    python = environment("trl", TRL)
    task = TASKS[lengths]
    assets = ensure_assets(task.settings, CACHE)
    report.settings |= {"lengths": lengths, "accuracy": accuracy, "steps": steps, "every": EVERY}
    ratios = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        for at, chosen in enumerate(seed or SEEDS):
            folder = Path(name) / str(chosen)
            folder.mkdir()
            sides = {
                "asyncrl": partial(ours, assets, task.keys, folder, chosen, steps),
                "trl": partial(trl, python, assets, task.keys, folder, chosen, steps),
            }
            order = list(sides) if at % 2 == 0 else list(reversed(sides))
            found = {side: sides[side]() for side in order}
            reached = {side: seconds_until(accuracy, points) for side, points in found.items()}
            for side in sides:
                _report(report, f"{side}_seed_{chosen}", found[side], reached[side])
            if (found_ratio := ratio(reached["asyncrl"], reached["trl"])) is not None:
                ratios.append(found_ratio)
    if ratios:
        report.ratio(f"quickstart_{lengths}_vs_trl", median(ratios), Target(">=", task.target))
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        report.say(f"TRL's seconds over ours: median {median(ratios):.3f} of {each}")
    else:
        report.say(f"no seed reached {accuracy} on any side")


def _report(report: Report, name: str, points: Sequence[Point], reached: float | None) -> None:
    curve = [[point.step, round(point.seconds, 3), round(point.accuracy, 4)] for point in points]
    report.figures[name] = {"seconds": reached, "step_accuracy_seconds": curve}
    when = "never" if reached is None else f"after {reached:.1f} s"
    last = points[-1]
    report.say(f"{name:20} there {when}; {last.seconds / last.step:.3f} s a step, {last.accuracy:.3f} at the end")


def ours(assets: Assets, further: Mapping[str, str], folder: Path, seed: int, steps: int) -> list[Point]:
    """One run by asyncrl-launch, with a checkpoint wherever accuracy is to be known."""
    out = folder / "asyncrl"
    keys = {
        "run.dir": out,
        "run.name": "run",
        "run.seed": seed,
        "learner.steps": steps,
        "checkpoint.every_versions": EVERY,
        "checkpoint.keep_every_steps": EVERY,
        **further,
        **{f"eval.{of}.{when}": "false" for of in ("heldout", "heldout_greedy") for when in ("at_start", "at_end")},
    }
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    run_command(launch_command(assets, str(CONFIG), flags), folder)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["time/step_s"] for line in lines if line.get("kind") == "train"]
    seconds[0] -= waited_for_engine(json.loads((out / "run" / "trace" / "trace-001.json").read_text())["traceEvents"])
    for step in range(EVERY, steps + 1, EVERY):
        export = [str(out / "run"), str(out / f"v{step}"), "--version", str(step)]
        run_command([sys.executable, "-m", "asyncrl.cli.export", *export], folder)
    return _points(assets, out, seconds)


def waited_for_engine(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that the first step waited before the engine had started; ``events`` of a trace (observe/trace.py)."""
    waited = min(event["ts"] for event in events if event["name"] == "wait for groups")
    generated = min(event["ts"] for event in events if event["name"].startswith("generate v"))
    return max(0.0, float(generated - waited) / 1e6)


def trl(python: Path, assets: Assets, further: Mapping[str, str], folder: Path, seed: int, steps: int) -> list[Point]:
    """One run of GRPOTrainer, with the settings of the quickstart's file."""
    heldout = {f"eval.{of}.data.path": str(assets.heldout) for of in ("heldout", "heldout_greedy")}
    config = load_config(
        [CONFIG], {"model.path": str(assets.model), "data.path": str(assets.train), **heldout, **further}
    )
    learner, rollout = config.learner, config.rollout
    settings = {
        "seed": seed,
        "steps": steps,
        "every": EVERY,
        "threads": 2,
        "trajectories": learner.groups_per_step * rollout.samples_per_prompt,
        "samples": rollout.samples_per_prompt,
        "max_tokens": rollout.max_tokens,
        "pattern": config.reward.options["pattern"],
        "lr": learner.lr,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
    }
    out = folder / "trl"
    out.mkdir()
    script = Path(__file__).with_name("trl_quickstart.py")
    command = [str(python), "-I", str(script), str(assets.model), str(assets.train), str(out), json.dumps(settings)]
    run_command(command, folder, without_python_settings())
    return _points(assets, out, json.loads((out / "steps.json").read_text()))


def run_command(command: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    """Run a command, whose output goes to a file in ``folder``. Raises RuntimeError with its end if it fails."""
    output = folder / "output.txt"
    with output.open("w") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=RUN_S, env=variables
        )
    if ended.returncode != 0:
        last = "\n".join(output.read_text().splitlines()[-10:])
        raise RuntimeError(f"exit code {ended.returncode} of {' '.join(command[:4])}:\n{last}")


def _points(assets: Assets, folder: Path, seconds: Sequence[float]) -> list[Point]:
    passed = [0.0, *accumulate(seconds)]
    kept = range(EVERY, len(seconds) + 1, EVERY)
    return [
        Point(0, 0.0, heldout_accuracy(assets, assets.model)),
        *(Point(step, passed[step], heldout_accuracy(assets, folder / f"v{step}")) for step in kept),
    ]


def heldout_accuracy(assets: Assets, model: Path) -> float:
    """Share of right samples at temperature 1, ``SAMPLES`` of each held-out problem; the same seed for every model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tools.quickstart.task import Problem
    from tools.quickstart.warmup import solved_share

    rows = [json.loads(line) for line in assets.heldout.read_text().splitlines()]
    problems = [Problem(*map(int, row["prompt"].rstrip("=").split("+"))) for row in rows] * SAMPLES
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.model)
    torch.manual_seed(0)
    return solved_share(policy.eval(), tokenizer, problems)

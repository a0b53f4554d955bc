"""The runs of a comparison: each variant with each seed, a folder each, kept for the next call.

Invariant: a folder with result.json holds an ended run and its command. The run is not repeated for the same command. A
failed run is a result too: the tool prints it and continues with the others.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE
from tools.compare.variants import BASE, TAUGHT_BY, Variant
from tools.quickstart.__main__ import CONFIG, launch_command
from tools.quickstart.assets import Assets

RESULT, OUTPUT = "result.json", "output.txt"
INTERRUPTED = (PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of a run that a user ended. Such a run is no result."""
LAST_LINES = 5
"""Printed last lines of the output of a failed run."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run. All but the first four are 0 where it failed."""

    variant: str
    group: str
    seed: int
    failed: str
    """The last lines of its output; empty if it ended well."""
    before: float = 0.0
    """Mean held-out reward of the first version."""
    after: float = 0.0
    """Mean held-out reward of the last version."""
    greedy: float = 0.0
    """Mean held-out reward of the last version, decoded greedily."""
    staleness: float = 0.0
    """Mean staleness of the trained tokens, versions."""
    behaviour_kl: float = 0.0
    """Mean over the steps, nats."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is to be."""

    variant: Variant
    seed: int
    folder: Path
    command: list[str]


def plan_runs(
    variants: Sequence[Variant], seeds: Sequence[int], assets: Assets, folder: Path, further: Sequence[str]
) -> list[Plan]:
    """A plan for each variant and seed; those with a teacher last."""
    found = []
    for variant in sorted(variants, key=lambda each: each.taught):
        for seed in seeds:
            here = run_folder(folder, variant.group, variant.name, seed)
            keys = {**BASE, **variant.keys, "run.seed": str(seed), "run.name": "run", "run.dir": str(here)}
            if variant.taught:
                teacher = run_folder(folder, variant.group, TAUGHT_BY, seed)
                keys["learner.teacher"] = str(teacher / "run" / "export")
            flags = [word for key, value in keys.items() for word in (f"--{key}", value)]
            found.append(Plan(variant, seed, here, launch_command(assets, str(CONFIG), [*flags, *further])))
    return found


def run_folder(folder: Path, group: str, name: str, seed: int) -> Path:
    """The folder of one run."""
    words = "".join(c if c.isalnum() else "-" for c in f"{group}-{name}")
    return folder / f"{words}-{seed}"


def run_all(plans: Sequence[Plan], *, jobs: int, tell: Callable[[Result], None]) -> list[Result]:
    """Make the runs, ``jobs`` at a time, in order; those with a teacher begin when all others have ended."""
    results: list[Result] = []
    for taught in (False, True):
        with ThreadPoolExecutor(jobs) as pool:
            for result in pool.map(run, [plan for plan in plans if plan.variant.taught is taught]):
                tell(result)
                results.append(result)
    return results


def run(plan: Plan) -> Result:
    """Make one run, or read what it brought."""
    file = plan.folder / RESULT
    if file.exists():
        told = json.loads(file.read_text())
        if told["command"] == plan.command:
            return Result(**told["result"])
    if plan.folder.exists():
        shutil.rmtree(plan.folder)
    plan.folder.mkdir(parents=True)
    with (plan.folder / OUTPUT).open("w") as output:
        ended = subprocess.run(plan.command, stdout=output, stderr=subprocess.STDOUT, check=False)
    result = _read(plan, ended.returncode)
    if ended.returncode not in INTERRUPTED:
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"command": plan.command, "result": asdict(result)}))
        part.rename(file)
    return result


def _read(plan: Plan, code: int) -> Result:
    result = Result(plan.variant.name, plan.variant.group, plan.seed, failed="")
    if code != 0:
        last = (plan.folder / OUTPUT).read_text().splitlines()[-LAST_LINES:]
        return replace(result, failed="\n".join([f"exit code {code}", *last]))
    lines = [json.loads(line) for line in (plan.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = figures(lines)
    return replace(
        result,
        before=found["before"],
        after=found["after"],
        greedy=found["greedy"],
        staleness=found["staleness"],
        behaviour_kl=found["behaviour_kl"],
    )


def figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of a Result from the lines of a metrics.jsonl."""
    sampled = sorted(
        (line["weights/version"], line["eval/heldout/mean"]) for line in lines if "eval/heldout/mean" in line
    )
    greedy = sorted(
        (line["weights/version"], line["eval/heldout_greedy/mean"])
        for line in lines
        if "eval/heldout_greedy/mean" in line
    )
    return {
        "before": sampled[0][1],
        "after": sampled[-1][1],
        "greedy": greedy[-1][1],
        "staleness": _mean(lines, "staleness/token_mean"),
        "behaviour_kl": _mean(lines, "policy/behaviour_kl"),
    }


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    # A step that was trained again has several lines; the last counts.
    steps = {line["step"]: float(line[name]) for line in lines if line.get("kind") == "train" and name in line}
    return sum(steps.values()) / max(1, len(steps))

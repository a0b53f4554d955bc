"""``python -m tools.compare losses``: train the quickstart's task with each loss and advantage, and compare.

Each variant runs with each seed in a folder of its own in ``--folder``. A folder with result.json holds an ended run
and its command. An interrupted call continues there: the run is not repeated for the same command. A failed run is a
result too: the tool prints it and continues with the others. It prints the table and writes table.md next to the runs:
a row for each variant with the held-out reward of each seed. Further arguments go to asyncrl-launch. The exit code is 1
if a run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE
from tools import kept
from tools.asset_cache import Assets
from tools.quickstart.__main__ import CACHE, CONFIG, ROOT, launch_command
from tools.quickstart.assets import ensure_assets
from tools.quickstart.settings import Settings

RESULT, OUTPUT = "result.json", "output.txt"
INTERRUPTED = (PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of a run that a user ended. Such a run is no result."""
LAST_LINES = 5
"""Printed last lines of the output of a failed run."""
BASE: Mapping[str, str] = {
    "learner.ranks": "1",
    "learner.steps": "25",
    "learner.dynamic_sampling": "true",
    "eval.heldout_greedy.at_start": "false",
}
"""Keys of every run: it ends where curves are apart, half-way through the quickstart. Trained groups have a signal."""
STALE: Mapping[str, str] = {"staleness.max": "4", "staleness.adapt": "false"}
"""The gate lets generation run four versions ahead, and stays there."""
TAUGHT_BY = "decoupled"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of training."""

    name: str
    group: str
    """The table that it stands in."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys and their values, as on a command line."""
    taught: bool = False
    """Learns from a teacher."""


LOSSES, ADVANTAGES, CORRECTIONS = "losses", "advantages", "corrections at staleness.max = 4"

VARIANTS: tuple[Variant, ...] = (
    Variant("decoupled", LOSSES),
    Variant("decoupled, 2 updates", LOSSES, {"learner.updates_per_batch": "2"}),
    Variant(
        "asymmetric clip, 2 updates",
        LOSSES,
        {"learner.updates_per_batch": "2", "learner.loss_options.clip_high": "0.28"},
    ),
    Variant("bypass", LOSSES, {"learner.loss": "bypass"}),
    Variant("gspo", LOSSES, {"learner.loss": "gspo", "learner.aggregation": "sequence"}),
    Variant("cispo", LOSSES, {"learner.loss": "cispo"}),
    Variant("dppo", LOSSES, {"learner.loss": "dppo"}),
    Variant("reinforce", LOSSES, {"learner.loss": "reinforce"}),
    Variant("decoupled, KL to the start", LOSSES, {"learner.kl.coefficient": "0.01"}),
    Variant("distill", LOSSES, {"learner.loss": "distill"}, taught=True),
    Variant("dr_grpo", ADVANTAGES, {"learner.advantage": "dr_grpo", "learner.aggregation": "constant"}),
    Variant("rloo", ADVANTAGES, {"learner.advantage": "rloo"}),
    Variant("reinforce", ADVANTAGES, {"learner.advantage": "reinforce", "learner.dynamic_sampling": "false"}),
    Variant("uncorrected", CORRECTIONS, {**STALE, "learner.correction.weight": "none"}),
    Variant("weight by token", CORRECTIONS, {**STALE, "learner.correction.weight": "token"}),
    Variant("weight by sequence", CORRECTIONS, {**STALE, "learner.correction.weight": "sequence"}),
    Variant("mask", CORRECTIONS, {**STALE, "learner.correction.mask": "[0.5, 2.0]"}),
    Variant("bypass", CORRECTIONS, {**STALE, "learner.loss": "bypass"}),
)


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
    sampled, greedy = (
        [line[name] for line in sorted(lines, key=lambda line: line.get("weights/version", 0)) if name in line]
        for name in ("eval/heldout/mean", "eval/heldout_greedy/mean")
    )
    return replace(
        result,
        before=sampled[0],
        after=sampled[-1],
        greedy=greedy[-1],
        staleness=_mean(lines, "staleness/token_mean"),
        behaviour_kl=_mean(lines, "policy/behaviour_kl"),
    )


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    # A step that was trained again has several lines; the last counts.
    steps = {line["step"]: float(line[name]) for line in lines if line.get("kind") == "train" and name in line}
    return sum(steps.values()) / max(1, len(steps))


def markdown(results: Sequence[Result]) -> str:
    """A table for each group."""
    tables = []
    for group in dict.fromkeys(result.group for result in results):
        rows = [
            f"| {group} | after, mean | each seed | greedy | staleness | behaviour KL |",
            "|---|---|---|---|---|---|",
            *(_row(found) for found in by_variant([r for r in results if r.group == group])),
        ]
        tables.append("\n".join(rows))
    ended = [result for result in results if not result.failed]
    before = f"Held-out reward before: {fmean(r.before for r in ended):.3f}.\n\n" if ended else ""
    return before + "\n\n".join(tables) + "\n"


def by_variant(results: Sequence[Result]) -> list[list[Result]]:
    """The runs of each variant, in the order of the variants."""
    places = dict.fromkeys((result.group, result.variant) for result in results)
    return [[r for r in results if (r.group, r.variant) == place] for place in places]


def _row(runs: Sequence[Result]) -> str:
    ended = [run for run in runs if not run.failed]
    if not ended:
        return f"| {runs[0].variant} | failed | {len(runs)} of {len(runs)} | | | |"
    each = ", ".join("failed" if run.failed else f"{run.after:.3f}" for run in runs)
    return (
        f"| {runs[0].variant} | {fmean(r.after for r in ended):.3f} | {each} | {fmean(r.greedy for r in ended):.3f} "
        f"| {fmean(r.staleness for r in ended):.2f} | {fmean(r.behaviour_kl for r in ended):.4f} |"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.compare",
        usage="%(prog)s losses [--seed N ...] [--only NAME] [--folder DIR] [--KEY VALUE ...]",
        description="Train the quickstart's task with each loss and advantage, and compare.",
        epilog="Everything else goes to asyncrl-launch: --learner.steps 20, ...",
        allow_abbrev=False,
    )
    found.add_argument("what", choices=["losses"])
    found.add_argument("--seed", type=int, action="append", metavar="N", help="of a run (1, 2 and 3)")
    found.add_argument("--only", action="append", metavar="NAME", help="variants of this name; may be given again")
    found.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare-losses", help="of the runs")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code."""
    given, further = parser().parse_known_args(arguments)
    names = {variant.name for variant in VARIANTS}
    chosen = set(given.only or names)
    if unknown := chosen - names:
        print(f"compare: no variant is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
        return 2
    if any(variant.taught and variant.name in chosen for variant in VARIANTS):
        chosen.add(TAUGHT_BY)
    variants = [variant for variant in VARIANTS if variant.name in chosen]
    assets = ensure_assets(Settings(), CACHE)
    folder = given.folder.absolute()
    plans = plan_runs(variants, given.seed or [1, 2, 3], assets, folder, further)
    results = []
    for plan in plans:
        results.append(run(plan))
        _report(results[-1])
    order = [(variant.group, variant.name) for variant in VARIANTS]
    results.sort(key=lambda result: (order.index((result.group, result.variant)), result.seed))
    (folder / "table.md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any(result.failed for result in results) else 0


def _report(result: Result) -> None:
    name = f"{result.variant} ({result.group}), seed {result.seed}"
    said = f"FAILED: {result.failed}" if result.failed else f"{result.before:.3f} -> {result.after:.3f}"
    print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(kept.run(main))

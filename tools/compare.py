"""``python -m tools.compare losses``: train the quickstart's task with each loss and advantage, and compare.

Each variant runs with each seed in a folder of its own below FOLDER. A folder with result.json holds an ended run and
its configuration: the run is not repeated for the same one, so an interrupted call continues. A failed run is a result
too: the tool prints it and continues with the others. It prints the table and writes table.md next to the runs: a row
for each variant with the held-out reward of each seed. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.observe.metrics_line import read_metrics
from tools import kept
from tools.asset_cache import Assets
from tools.live_run import ROOT, RunEnded, quickstart, run_to_end
from tools.quickstart.assets import ensure_assets

FOLDER = ROOT / "runs" / "compare-losses"
RESULT = "result.json"
RUN_S = 3600.0
SEEDS = (1, 2, 3)
BASE: Mapping[str, Any] = {
    "learner.ranks": 1,
    "learner.steps": 25,
    "learner.dynamic_sampling": True,
    "eval.heldout_greedy.at_start": False,
}
"""Keys of every run: it ends where curves are apart, half-way through the quickstart. Trained groups have a signal."""
STALE: Mapping[str, Any] = {"staleness.max": 4, "staleness.adapt": False}
"""The gate lets generation run four versions ahead, and stays there."""
TAUGHT_BY = "decoupled"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of training."""

    name: str
    group: str
    """The table that it stands in."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Configuration keys and their values."""

    @property
    def taught(self) -> bool:
        """Learns from a teacher, the run of TAUGHT_BY with the same seed."""
        return self.keys.get("learner.loss") == "distill"


LOSSES, ADVANTAGES, CORRECTIONS = "losses", "advantages", "corrections at staleness.max = 4"
TWICE: Mapping[str, Any] = {"learner.updates_per_batch": 2}

VARIANTS = (
    Variant("decoupled", LOSSES),
    Variant("decoupled, 2 updates", LOSSES, TWICE),
    Variant("asymmetric clip, 2 updates", LOSSES, {**TWICE, "learner.loss_options.clip_high": 0.28}),
    Variant("bypass", LOSSES, {"learner.loss": "bypass"}),
    Variant("gspo", LOSSES, {"learner.loss": "gspo", "learner.aggregation": "sequence"}),
    Variant("cispo", LOSSES, {"learner.loss": "cispo"}),
    Variant("dppo", LOSSES, {"learner.loss": "dppo"}),
    Variant("reinforce", LOSSES, {"learner.loss": "reinforce"}),
    Variant("decoupled, KL to the start", LOSSES, {"learner.kl.coefficient": 0.01}),
    Variant("distill", LOSSES, {"learner.loss": "distill"}),
    Variant("dr_grpo", ADVANTAGES, {"learner.advantage": "dr_grpo", "learner.aggregation": "constant"}),
    Variant("rloo", ADVANTAGES, {"learner.advantage": "rloo"}),
    Variant("reinforce", ADVANTAGES, {"learner.advantage": "reinforce", "learner.dynamic_sampling": False}),
    Variant("uncorrected", CORRECTIONS, {**STALE, "learner.correction.weight": "none"}),
    Variant("weight by token", CORRECTIONS, {**STALE, "learner.correction.weight": "token"}),
    Variant("weight by sequence", CORRECTIONS, {**STALE, "learner.correction.weight": "sequence"}),
    Variant("mask", CORRECTIONS, {**STALE, "learner.correction.mask": [0.5, 2.0]}),
    Variant("bypass", CORRECTIONS, {**STALE, "learner.loss": "bypass"}),
)
"""In the order in which they run: TAUGHT_BY is before those that it teaches."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run. All but the first four are 0 where it failed."""

    variant: str
    group: str
    seed: int
    failed: str
    """The end of its output; empty if it ended well."""
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
    tree: dict[str, Any]


def plan_runs(variants: Sequence[Variant], seeds: Sequence[int], assets: Assets, folder: Path) -> list[Plan]:
    """A plan for each variant and seed."""
    found = []
    for variant in variants:
        for seed in seeds:
            keys = {**BASE, **variant.keys, "run.seed": seed}
            if variant.taught:
                teacher = run_folder(folder, variant.group, TAUGHT_BY, seed)
                keys["learner.teacher"] = str(teacher / "runs" / "live" / "export")
            here = run_folder(folder, variant.group, variant.name, seed)
            found.append(Plan(variant, seed, here, quickstart(assets, keys)))
    return found


def run_folder(folder: Path, group: str, name: str, seed: int) -> Path:
    words = "".join(c if c.isalnum() else "-" for c in f"{group}-{name}")
    return folder / f"{words}-{seed}"


def run(plan: Plan) -> Result:
    """Make one run, or read its result."""
    file = plan.folder / RESULT
    if file.exists() and (known := json.loads(file.read_text()))["tree"] == plan.tree:
        return Result(**known["result"])
    shutil.rmtree(plan.folder, ignore_errors=True)
    figures: dict[str, Any] = {"failed": ""}
    try:
        figures |= figures_of(read_metrics(run_to_end(plan.tree, plan.folder, RUN_S).run_dir / "metrics.jsonl"))
    except RunEnded as error:
        figures["failed"] = str(error)[-500:]
    result = Result(plan.variant.name, plan.variant.group, plan.seed, **figures)
    file.write_text(json.dumps({"tree": plan.tree, "result": asdict(result)}))
    return result


def figures_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of a Result in lines of metrics.jsonl."""
    ordered = sorted(lines, key=lambda line: line.get("weights/version", 0))
    sampled, greedy, staleness, behaviour_kl = (
        [line[name] for line in ordered if name in line]
        for name in ("eval/heldout/mean", "eval/heldout_greedy/mean", "staleness/token_mean", "policy/behaviour_kl")
    )
    found = {"before": sampled[0], "after": sampled[-1], "greedy": greedy[-1]}
    return found | {"staleness": fmean(staleness), "behaviour_kl": fmean(behaviour_kl)}


def markdown(results: Sequence[Result]) -> str:
    """A table for each group, with a row for each variant."""
    ended = [result for result in results if not result.failed]
    text = f"Held-out reward before: {fmean(r.before for r in ended):.3f}.\n" if ended else ""
    for group in dict.fromkeys(result.group for result in results):
        text += (
            f"\n| {group} | after, mean | each seed | greedy | staleness | behaviour KL |\n|---|---|---|---|---|---|\n"
        )
        for variant in dict.fromkeys(result.variant for result in results if result.group == group):
            text += _row([r for r in results if (r.group, r.variant) == (group, variant)]) + "\n"
    return text


def _row(runs: Sequence[Result]) -> str:
    ended = [run for run in runs if not run.failed]
    if not ended:
        return f"| {runs[0].variant} | failed | {len(runs)} of {len(runs)} | | | |"
    each = ", ".join("failed" if run.failed else f"{run.after:.3f}" for run in runs)
    return (
        f"| {runs[0].variant} | {fmean(r.after for r in ended):.3f} | {each} | {fmean(r.greedy for r in ended):.3f} "
        f"| {fmean(r.staleness for r in ended):.2f} | {fmean(r.behaviour_kl for r in ended):.4f} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["losses"])
    parser.parse_args(arguments)
    results = []
    for plan in plan_runs(VARIANTS, SEEDS, ensure_assets(), FOLDER):
        result = run(plan)
        said = f"FAILED: {result.failed}" if result.failed else f"{result.before:.3f} -> {result.after:.3f}"
        print(f"{result.variant} ({result.group}), seed {result.seed}: {said}", flush=True)
        results.append(result)
    (FOLDER / "table.md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(kept.run(main))

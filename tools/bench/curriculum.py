"""``python -m tools.bench curriculum``: tokens until the quickstart's policy is right, with and without a curriculum.

A third of the training prompts are the quickstart's own. A third are solved from the start: sums without a carry. A
third are hopeless: their answers are wrong. Both sides train on the same prompts with dynamic sampling, so each step
has as many groups with a signal, and groups without one cost generation alone. Tokens are those of the responses in
groups that were trained or filtered. Between two evaluations, accuracy is taken to rise evenly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.observe.metrics_line import read_metrics
from tools.asset_cache import Assets
from tools.bench.quickstart import RUN_S, SEEDS, Point, race, report_median
from tools.bench.report import Report, Target
from tools.live_run import quickstart, run_to_end
from tools.quickstart.assets import ensure_assets

PROMPTS = 128
"""Prompts of each third."""
EVERY = 4
"""Steps between two evaluations."""
SIDES: dict[str, Mapping[str, Any]] = {"without": {}, "with": {"data.curriculum": {"rest": 4, "longest": 32}}}


def measure(report: Report, *, seed: tuple[int, ...] = SEEDS, accuracy: float = 0.8, steps: int = 44) -> None:
    """Raises RunEnded when a run fails."""
    assets = ensure_assets()
    report.settings |= {"prompts": 3 * PROMPTS, "accuracy": accuracy, "steps": steps, "every": EVERY}
    sides = {side: partial(_run, assets, keys, steps) for side, keys in SIDES.items()}
    reached = race(report, sides, seed, accuracy, "tokens")
    ratios = [each["with"] / each["without"] if each["with"] and each["without"] else None for each in reached]
    report_median(report, "curriculum_tokens", ratios, Target("<=", 1.0))


def mixed_rows(assets: Assets) -> list[dict[str, Any]]:
    """Return the rows: useful, solved and hopeless, in a fixed random order."""
    own = [json.loads(line) for line in assets.train.read_text().splitlines()[: 2 * PROMPTS]]
    useful, hopeless = own[:PROMPTS], [row | {"answer": "none"} for row in own[PROMPTS:]]
    chance = random.Random(0)
    solved = []
    for _ in range(PROMPTS):
        pairs = [(left := chance.randint(1, 8), chance.randint(1, 9 - left)) for _ in range(chance.randint(3, 4))]
        left, right = (int("".join(str(pair[side]) for pair in pairs)) for side in (0, 1))
        solved.append({"prompt": f"{left}+{right}=", "answer": str(left + right)})
    rows = [*useful, *solved, *hopeless]
    chance.shuffle(rows)
    return rows


def _run(assets: Assets, keys: Mapping[str, Any], steps: int, folder: Path, seed: int) -> list[Point]:
    """Run one side. Returns its evaluations, with tokens as their costs."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in mixed_rows(assets)))
    further = {
        "run.seed": seed,
        "data.path": str(prompts),
        "learner.steps": steps,
        "learner.dynamic_sampling": True,
        "eval.heldout.every_versions": EVERY,
        "eval.heldout.n": 2,
        "eval.heldout_greedy.at_start": False,
        "eval.heldout_greedy.at_end": False,
    }
    run = run_to_end(quickstart(assets, {**further, **keys}), folder, RUN_S)
    return points_of(read_metrics(run.run_dir / "metrics.jsonl"), samples=8)


def points_of(lines: Sequence[Mapping[str, Any]], *, samples: int) -> list[Point]:
    """Return the evaluations in lines of metrics.jsonl, with the tokens generated for training up to each."""
    tokens, groups, at = {0: 0.0}, 0.0, 0
    for line in lines:
        if line["kind"] == "train":
            concluded = line["ledger/trained"] + line["ledger/filtered"]
            tokens[line["step"]] = tokens[at] + (concluded - groups) * samples * line["rollout/length_mean"]
            groups, at = concluded, line["step"]
    found = {}
    for line in lines:
        if line["kind"] == "eval" and "eval/heldout/mean" in line:
            # A round of version v evaluates the weights after step v, and may end some steps later.
            step = min(int(line["weights/version"]), at)
            found[step] = Point(step, tokens[step], line["eval/heldout/mean"])
    return [found[step] for step in sorted(found)]

"""``python -m tools.bench curriculum``: tokens until the quickstart's policy is right, with and without a curriculum.

A third of the training prompts are the quickstart's own. A third are solved from the start: sums without a carry. A
third are hopeless: their answers are wrong. Both sides train on the same prompts with dynamic sampling, so each step
has as many groups with a signal, and groups without one cost generation alone. Tokens are those of the responses in
groups that were trained or filtered. Between two evaluations, accuracy is taken to rise evenly.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.asset_cache import Assets
from tools.bench.quickstart import SEEDS, Point, run_command, seconds_until
from tools.bench.report import Report, Target
from tools.quickstart.__main__ import CACHE, CONFIG, launch_command
from tools.quickstart.assets import ensure_assets
from tools.quickstart.settings import Settings

PROMPTS = 128
"""Prompts of each third."""
EVERY = 4
"""Steps between two evaluations."""
SIDES: dict[str, Mapping[str, str]] = {
    "without": {},
    "with": {"data.curriculum.rest": "4", "data.curriculum.longest": "32"},
}


def measure(report: Report, *, seed: list[int] | None, accuracy: float, steps: int) -> None:
    """Fill the report. Raises RuntimeError when a run fails."""
    assets = ensure_assets(Settings(), CACHE)
    report.settings |= {"prompts": 3 * PROMPTS, "accuracy": accuracy, "steps": steps, "every": EVERY}
    ratios = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        for at, chosen in enumerate(seed or SEEDS):
            folder = Path(name) / str(chosen)
            folder.mkdir()
            prompts = folder / "prompts.jsonl"
            prompts.write_text("".join(json.dumps(row) + "\n" for row in mixed_rows(assets)))
            reached = {}
            for side in list(SIDES) if at % 2 == 0 else reversed(SIDES):
                points = _run(assets, prompts, SIDES[side], folder / side, chosen, steps)
                reached[side] = seconds_until(accuracy, points)
                when = "never" if reached[side] is None else f"after {reached[side]:,.0f} tokens"
                report.figures[f"{side}_seed_{chosen}"] = {
                    "tokens": reached[side],
                    "step_tokens_accuracy": [[p.step, round(p.seconds), round(p.accuracy, 4)] for p in points],
                }
                report.say(f"{side:8} seed {chosen}: there {when}; {points[-1].accuracy:.3f} at the end")
            if reached["with"] is not None and reached["without"] is not None:
                ratios.append(reached["with"] / reached["without"])
    if ratios:
        report.ratio("curriculum_tokens", median(ratios), Target("<=", 1.0))
        report.say(f"tokens with a curriculum over those without: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


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


def _run(
    assets: Assets, prompts: Path, further: Mapping[str, str], out: Path, seed: int, steps: int
) -> Sequence[Point]:
    """Run one side. Returns its evaluations; ``Point.seconds`` are tokens."""
    keys = {
        "run.dir": str(out),
        "run.name": "run",
        "run.seed": str(seed),
        "data.path": str(prompts),
        "learner.steps": str(steps),
        "learner.dynamic_sampling": "true",
        "eval.heldout.every_versions": str(EVERY),
        "eval.heldout.n": "2",
        "eval.heldout_greedy.at_start": "false",
        "eval.heldout_greedy.at_end": "false",
        **further,
    }
    out.mkdir()
    flags = [word for key, value in keys.items() for word in (f"--{key}", value)]
    run_command(launch_command(assets, str(CONFIG), flags), out)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return points_of(lines, samples=8)


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

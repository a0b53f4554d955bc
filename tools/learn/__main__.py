"""``python -m tools.learn RECIPE``: make model and tasks if they are not cached, train, and print the result.

Further arguments go to asyncrl-launch:

    python -m tools.learn guess-number --run.seed 1 --json

The exit code is the launcher's. With ``--json`` the last line of a run that ended well is an object with the held-out
return before and after, and the share of trained trajectories that were sampled under several versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import kept
from tools.asset_cache import Assets
from tools.learn import guess_number, smollm2, tool_lookup
from tools.learn.assets import ensure_assets

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache" / "learn"
RECIPES = {
    "guess-number": guess_number.RECIPE,
    "tool-lookup": tool_lookup.RECIPE,
    "smollm2": smollm2.RECIPE,
}
SAMPLES = 4
"""Prompts of a step that are shown."""
RUN_FOLDER = "run folder"
"""Beginning of the line of the launcher's summary that names it."""

RUN_ENDS_S = 900.0
"""Time that a run has to end in good order after a signal."""


def launch_command(name: str, assets: Assets, further: Sequence[str]) -> list[str]:
    """The launcher's command line; what is in ``further`` wins."""
    return [
        *(sys.executable, "-m", "asyncrl.cli.launch", str(ROOT / "configs" / f"{name}.toml")),
        *("--model.path", str(assets.model)),
        *("--data.path", str(assets.train)),
        *("--eval.heldout.data.path", str(assets.heldout)),
        *further,
    ]


def findings(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a metrics.jsonl: held-out return at the first and the last version, versions and steps."""
    evals = sorted(
        (line["weights/version"], line["eval/heldout/mean"]) for line in lines if "eval/heldout/mean" in line
    )
    # A step that was trained again has several lines; the last counts.
    steps = {line["step"]: line for line in lines if "rollout/mixed_version_fraction" in line}
    mixed = [line["rollout/mixed_version_fraction"] for line in steps.values()]
    (first, before), (last, after) = evals[0], evals[-1]
    return {
        "steps": len(steps),
        "mixed_version_fraction": sum(mixed) / len(mixed),
        "versions": [first, last],
        "heldout_before": before,
        "heldout_after": after,
    }


def samples_of(folder: Path) -> Iterator[str]:
    """Lines with what the policy said to some prompts of the first step and of the last, and the rewards."""
    steps = sorted((folder / "samples").glob("step_*.jsonl"))
    for name, file in (("first", steps[0]), ("last", steps[-1])):
        yield f"in the {name} step:"
        for line in file.read_text().splitlines()[:SAMPLES]:
            sample = json.loads(line)
            trajectory = sample["trajectories"][0]
            yield f"  {sample['prompt']!r}  ->  {trajectory['text']!r}  reward {trajectory['reward']:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The launcher's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.learn",
        usage="%(prog)s RECIPE [--json] [--KEY VALUE ...]",
        description="Make a recipe's model and tasks if they are not cached, and train on them.",
        epilog="Everything else goes to asyncrl-launch: --run.seed 1, --learner.lr 0, --dry-run, ...",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--json", action="store_true", help="say as JSON, in the last line, what the run has brought")
    given, further = parser.parse_known_args(arguments)
    print(f"learn: model and tasks in {CACHE.relative_to(ROOT)}", flush=True)
    try:
        assets = ensure_assets(RECIPES[given.recipe], CACHE)
    except (OSError, RuntimeError) as error:
        print(f"learn: {error}", file=sys.stderr)
        return 1
    folder: Path | None = None
    with subprocess.Popen(
        launch_command(RECIPES[given.recipe].name, assets, further), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            print(line, end="", flush=True)
            if line.startswith(RUN_FOLDER):
                folder = Path(line.removeprefix(RUN_FOLDER).strip())
    if folder is None or launcher.returncode != 0:
        return launcher.returncode
    print(*samples_of(folder), sep="\n")
    if given.json:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        print(json.dumps({"recipe": given.recipe, "run_folder": str(folder)} | findings(lines)))
    return launcher.returncode


if __name__ == "__main__":
    # The run that it has started may write a checkpoint first.
    sys.exit(kept.run(main, grace_s=RUN_ENDS_S))

"""``python -m tools.compare losses``: train the quickstart's task with each loss and advantage, and compare.

Runs are kept in ``--folder``; an interrupted call continues there. The tool prints the table and writes table.md and
figure.svg next to the runs. Further arguments go to asyncrl-launch. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools import kept
from tools.compare.runs import Result, plan_runs, run_all
from tools.compare.table import figure, markdown
from tools.compare.variants import TAUGHT_BY, VARIANTS
from tools.quickstart.__main__ import CACHE, ROOT
from tools.quickstart.assets import ensure_assets
from tools.quickstart.settings import Settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.compare",
        usage="%(prog)s losses [--seed N ...] [--only NAME] [--jobs N] [--folder DIR] [--json] [--KEY VALUE ...]",
        description="Train the quickstart's task with each loss and advantage, and compare.",
        epilog="Everything else goes to asyncrl-launch: --learner.steps 20, ...",
        allow_abbrev=False,
    )
    found.add_argument("what", choices=["losses"])
    found.add_argument("--seed", type=int, action="append", metavar="N", help="of a run (1, 2 and 3)")
    found.add_argument("--only", action="append", metavar="NAME", help="variants of this name; may be given again")
    found.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    found.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare-losses", help="of the runs")
    found.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
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
    results = run_all(plans, jobs=given.jobs, tell=_tell)
    order = [(variant.group, variant.name) for variant in VARIANTS]
    results.sort(key=lambda result: (order.index((result.group, result.variant)), result.seed))
    (folder / "table.md").write_text(markdown(results))
    (folder / "figure.svg").write_text(figure(results))
    print(markdown(results))
    if given.json:
        print(json.dumps({"folder": str(folder), "results": [asdict(result) for result in results]}))
    return 1 if any(result.failed for result in results) else 0


def _tell(result: Result) -> None:
    name = f"{result.variant} ({result.group}), seed {result.seed}"
    said = f"FAILED: {result.failed}" if result.failed else f"{result.before:.3f} -> {result.after:.3f}"
    print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(kept.run(main))

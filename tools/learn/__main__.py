"""``python -m tools.learn RECIPE``: make model and tasks if they are not cached, then launch the run.

Further arguments go to asyncrl-launch, which replaces this process:

    python -m tools.learn guess-number --run.seed 1
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the launcher. Returns only if the assets cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.learn",
        usage="%(prog)s RECIPE [--KEY VALUE ...]",
        description="Make a recipe's model and tasks if they are not cached, and train on them.",
        epilog="Everything else goes to asyncrl-launch: --run.seed 1, --learner.lr 0, --dry-run, ...",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=sorted(RECIPES))
    given, further = parser.parse_known_args(arguments)
    print(f"learn: model and tasks in {CACHE.relative_to(ROOT)}", flush=True)
    recipe = RECIPES[given.recipe]
    try:
        command = launch_command(recipe.name, ensure_assets(recipe, CACHE), further)
    except (OSError, RuntimeError) as error:
        print(f"learn: {error}", file=sys.stderr)
        return 1
    os.execv(command[0], command)


if __name__ == "__main__":
    # The run may write a checkpoint first.
    sys.exit(kept.run(main, grace_s=RUN_ENDS_S))

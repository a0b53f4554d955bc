"""``python -m tools.learn RECIPE``: make model and tasks if they are not cached, then launch the run.

Further arguments go to asyncrl-launch, which replaces this process:

    python -m tools.learn guess-number --run.seed 1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tools import kept
from tools.asset_cache import launch, parser_of
from tools.learn import guess_number, smollm2, tool_lookup
from tools.learn.recipe import ensure_assets

RECIPES = {
    "guess-number": guess_number.RECIPE,
    "tool-lookup": tool_lookup.RECIPE,
    "smollm2": smollm2.RECIPE,
}
RUN_ENDS_S = 900.0
"""Time that a run has to end in good order after a signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("learn", "RECIPE ")
    parser.add_argument("recipe", choices=sorted(RECIPES))
    given, further = parser.parse_known_args(arguments)
    recipe = RECIPES[given.recipe]
    return launch(recipe.name, partial(ensure_assets, recipe), ("heldout",), further)


if __name__ == "__main__":
    # The run may write a checkpoint first.
    sys.exit(kept.run(main, grace_s=RUN_ENDS_S))

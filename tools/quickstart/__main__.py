"""``python -m tools.quickstart``: make the model and its data if they are not cached, then launch the run.

Further arguments go to asyncrl-launch, which replaces this process:

    python -m tools.quickstart --run.seed 1 --learner.lr 0
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.asset_cache import launch, parser_of
from tools.quickstart.assets import EVALS, ensure_assets


def main(arguments: Sequence[str] | None = None) -> int:
    _, further = parser_of("quickstart").parse_known_args(arguments)
    return launch("quickstart", ensure_assets, EVALS, further)


if __name__ == "__main__":
    sys.exit(main())

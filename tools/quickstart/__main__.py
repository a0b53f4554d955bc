"""``python -m tools.quickstart``: make the model and its data if they are not cached, then launch the run.

Further arguments go to asyncrl-launch, which replaces this process:

    python -m tools.quickstart --run.seed 1 --learner.lr 0
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.asset_cache import Assets
from tools.quickstart.assets import ensure_assets
from tools.quickstart.settings import Settings

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache" / "quickstart"
CONFIG = ROOT / "configs" / "quickstart.toml"


def launch_command(assets: Assets, config: str, further: Sequence[str]) -> list[str]:
    """Return the command line of the launcher. ``further`` arguments win."""
    return [
        *(sys.executable, "-m", "asyncrl.cli.launch", config),
        *("--model.path", str(assets.model)),
        *("--data.path", str(assets.train)),
        *("--eval.heldout.data.path", str(assets.heldout)),
        *("--eval.heldout_greedy.data.path", str(assets.heldout)),
        *further,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the launcher. Returns only if the assets cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.quickstart",
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        description="Make the quickstart's model and data if they are not cached, then launch the run.",
        epilog="Everything else goes to asyncrl-launch: --run.seed 1, --learner.lr 0, --dry-run, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=str(CONFIG), metavar="FILE", help="configuration of the run")
    given, further = parser.parse_known_args(arguments)
    print(f"quickstart: model and data in {CACHE.relative_to(ROOT)}", flush=True)
    try:
        assets = ensure_assets(Settings(), CACHE)
    except KeyboardInterrupt:
        return 130
    except (OSError, RuntimeError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    command = launch_command(assets, given.config, further)
    print(f"quickstart: {' '.join(command[1:])}", flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())

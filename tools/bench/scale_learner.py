"""The learner, whose broadcasts send no bytes: ``python -m tools.bench.scale_learner RUN`` and the words of an actor.

The stand-in for them is scale_collective.py's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.cli import actor
from tools.bench import scale_collective

if __name__ == "__main__":
    scale_collective.stand_in(Path(sys.argv.pop(1)))
    sys.exit(actor.main())

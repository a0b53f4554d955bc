"""asyncrl-export."""

from __future__ import annotations

import sys


def main() -> int:
    """Say that the command is not there yet."""
    print("asyncrl-export is not there yet", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

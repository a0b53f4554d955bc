"""Tools of the project: not part of the package."""

import sys

from asyncrl.core.streams import replace_unknown

# Here, so that it holds for each tool: all are started by ``python -m tools.NAME``.
replace_unknown(sys.stdout, sys.stderr)

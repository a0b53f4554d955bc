"""HTML pages of a run that need nothing else: their files, the chart library uPlot, and their security policy.

uPlot is vendored in uplot/ as it was published on npm; the first line of its script names the version. Invariant: under
``policy`` a browser runs and uses only the given scripts and styles, and loads nothing. Pure but for reading files of
the package.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

UPLOT_SCRIPT = "observe/uplot/uPlot.iife.min.js"
UPLOT_STYLE = "observe/uplot/uPlot.min.css"


def resource_text(name: str) -> str:
    """The text of a file of the package; ``name`` is its path below asyncrl/."""
    return (files("asyncrl") / name).read_text("utf-8")


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The meta element with the policy of a page that holds exactly these scripts and styles, each in an element."""
    allowed = {"script-src": scripts, "style-src": styles}
    sources = "; ".join(f"{kind} {' '.join(map(_digest, texts))}" for kind, texts in allowed.items())
    content = f"default-src 'none'; base-uri 'none'; form-action 'none'; {sources}"
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""The panels of a report: curves with their values, which the page's script (report.js) draws by uPlot.

Invariant: all text is escaped and holds no control character, and every number is finite. Pure.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.core.formatting import printable

SMALLEST = 1e-300
LARGEST = 1e300
"""Bounds of drawn sizes: a smaller size counts as 0, a larger one as the bound. So no difference is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one colour, in ascending order of x."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    marks: Literal["line", "dashes", "dots", "line and dots"] = "line"
    """How the points are drawn, unless curves are stacked."""
    notes: Sequence[str] = field(default=())
    """Texts that are shown with the values, one for each point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves in one frame."""

    curves: Sequence[Curve]
    title: str = ""
    unit: str = ""
    across: str = "step"
    """Unit of x."""
    stack: Literal["", "bars", "areas"] = ""
    """How curves are stacked on each other, all with the same x; empty if they are not stacked."""
    widths: Sequence[float] = field(default=())
    """Widths of the bars, in units of x. Each bar is centred on its x."""
    zero: bool = True
    """Whether the y axis includes 0."""
    shares: bool = False
    """Whether the values are shares, 0 to 1."""
    origin: float | None = None
    """Unix time (s) of x = 0 on a time axis; None on any other axis."""
    columns: Literal[1, 2, 3] = 1
    """Panels that share a row."""
    height: int = 280


def draw(panel: Panel) -> str:
    """Make the HTML of a panel: its title, and its values as JSON, escaped as an attribute."""
    curves = [
        {
            **{"name": printable(curve.name), "colour": curve.colour, "marks": curve.marks},
            "notes": list(map(printable, curve.notes)),
            **{"x": [_few(x) for x in curve.x], "y": [_few(y, 4) for y in curve.y]},
        }
        for curve in panel.curves
    ]
    data = {
        **{"unit": panel.unit, "across": panel.across, "stack": panel.stack, "widths": [_few(w) for w in panel.widths]},
        **{"zero": panel.zero, "shares": panel.shares, "origin": panel.origin, "height": panel.height},
        "curves": curves,
    }
    values = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False))
    title = f"<h3>{shown(panel.title)}</h3>" if panel.title else ""
    return f'<figure class="chart of{panel.columns}" data-chart="{values}">{title}</figure>'


def shown(text: str) -> str:
    """A text of the run as HTML: without control characters and marks of direction, except newlines, and escaped."""
    return html.escape(printable(text, keep="\n"))


def _few(value: float, digits: int = 8) -> float | int:
    """A number within the bounds, rounded to ``digits`` significant digits."""
    bounded = 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(LARGEST, value))
    few = float(f"{bounded:.{digits}g}")
    return int(few) if few == int(few) and abs(few) < 1e9 else few

"""Draws curves, bars and areas as SVG in HTML, with the values that the page's script (report.js) shows and zooms.

The script is optional. All text is escaped. Invariant: for all finite numbers the drawing is finite and within its
frame. Pure.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from asyncrl.core.numbers import count

LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 8.0, 38.0
"""Margins around the plot (px)."""
X_TICKS, Y_TICKS = 8, 5
X_TICK_ROOM = 75.0
MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Possible distances of ticks on a time axis (s)."""
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
    width: int = 1100
    height: int = 280


def draw(panel: Panel) -> str:
    """Draw the panel as HTML: title, legend, axes and plot."""
    tops = _tops(panel)
    x, y = _frame_x(panel), _frame_y(panel, tops)
    width, height = panel.width - LEFT - RIGHT, panel.height - TOP - BOTTOM
    shapes = "".join(_shapes(panel, tops, x, y, width, height))
    place = f"x={LEFT:g} y={TOP:g} width={width:g} height={height:g}"
    head = f"<h3>{html.escape(panel.title)}</h3>" if panel.title else ""
    return (
        f'<figure class=chart data-told="{_script_data(panel, x)}">{head}{_legend(panel)}'
        f'<svg viewBox="0 0 {panel.width} {panel.height}" role=img>{_axes(panel, x, y, width, height)}'
        f'<svg class=plot {place} viewBox="0 0 {width:g} {height:g}" preserveAspectRatio=none>{shapes}</svg>'
        f"<rect class=cursor x={LEFT:g} y={TOP:g} width=0 height={height:g} />"
        f"<rect class=pad {place} /></svg>"
        "<div class=tip hidden></div></figure>"
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The range of an axis."""

    low: float
    high: float

    def of(self, value: float) -> float:
        """Position of a value on the axis, 0 to 1."""
        return (_bounded(value) - self.low) / (self.high - self.low)


def ticks(low: float, high: float, most: int, steps: Iterable[float] = ()) -> list[float]:
    """Return round values from ``low`` to ``high``, at most ``most`` or one more.

    Their distance is the smallest of ``steps`` that is large enough, or else 1, 2 or 5 times a power of ten.
    """
    least = (high - low) / most
    step = next((each for each in steps if each >= least), None)
    if step is None:
        power = 10.0 ** math.floor(math.log10(least))
        # 0.999999 accepts a step that is too small only by rounding.
        step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= 0.999999 * least)
    # 1e-9 lets a multiple of ``step`` count that is outside only by rounding.
    lowest, highest = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(lowest, highest + 1)]


def _bounded(value: float) -> float:
    return 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(LARGEST, value))


def _tops(panel: Panel) -> list[list[float]]:
    """Compute the y values to draw for each curve. In a stack, a curve stands on the sum of the curves before it."""
    tops: list[list[float]] = []
    for curve in panel.curves:
        below = tops[-1] if tops and panel.stack else [0.0] * len(curve.y)
        tops.append([_bounded(y + under) for y, under in zip(curve.y, below, strict=True)])
    return tops


def _frame_x(panel: Panel) -> _Frame:
    """Choose the range of the x axis: all points with a margin, or all bars."""
    values = [_bounded(x) for curve in panel.curves for x in curve.x]
    if panel.widths:
        return _around(min(values) - panel.widths[0] / 2, max(values) + panel.widths[-1] / 2)
    frame = _around(min(values), max(values))
    # The margin keeps the border from cutting a dot.
    room = (frame.high - frame.low) / 100
    return _Frame(frame.low - room, frame.high + room)


def _frame_y(panel: Panel, tops: Sequence[Sequence[float]]) -> _Frame:
    """Choose the range of the y axis: all drawn values (``tops``) with a margin, and 0 if the panel includes it."""
    if panel.shares:
        return _Frame(0.0, 1.0)
    values = [y for curve in tops for y in curve]
    frame = _around(min(values), max(values))
    if panel.zero or panel.stack:
        frame = _Frame(min(0.0, frame.low), max(0.0, frame.high))
    # The margin keeps values away from the border.
    room = (frame.high - frame.low) / 20
    return _Frame(frame.low - (room if frame.low < 0.0 else 0.0), frame.high + room)


def _around(low: float, high: float) -> _Frame:
    """Make the range from ``low`` to ``high``, and make it wider if they are nearly equal."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return _Frame(low, high)
    room = max(abs(low), abs(high)) / 10 or 1.0
    return _Frame(low - room, high + room)


def _shapes(
    panel: Panel, tops: Sequence[Sequence[float]], x: _Frame, y: _Frame, width: float, height: float
) -> Iterable[str]:
    """Draw the curves as SVG paths in a plot of ``width`` times ``height``. ``tops`` are the results of ``_tops``."""

    def at(value: float) -> str:
        return _short(x.of(value) * width)

    def up(value: float) -> str:
        return _short((1.0 - y.of(value)) * height)

    for number, (curve, top) in enumerate(zip(panel.curves, tops, strict=True)):
        below = tops[number - 1] if number else [0.0] * len(top)
        if panel.stack == "bars":
            bars = (
                f"M{at(x0 - w / 2)},{up(y0)}V{up(y1)}H{at(x0 + w / 2)}V{up(y0)}z"
                for x0, y0, y1, w in zip(curve.x, below, top, panel.widths, strict=True)
                if y1 > y0
            )
            yield f'<path fill="{curve.colour}" d="{"".join(bars)}" />'
        elif panel.stack == "areas":
            forth = [f"{at(x0)},{up(y1)}" for x0, y1 in zip(curve.x, top, strict=True)]
            back = [f"{at(x0)},{up(y0)}" for x0, y0 in zip(curve.x, below, strict=True)]
            yield f'<path fill="{curve.colour}" d="M{"L".join([*forth, *reversed(back)])}z" />'
        else:
            points = [f"{at(x0)},{up(y0)}" for x0, y0 in zip(curve.x, top, strict=True)]
            if curve.marks != "dots":
                # A line with one point would be invisible, so draw a dot.
                kind = "line" if len(points) > 1 else "dots"
                dashes = " dashes" if curve.marks == "dashes" else ""
                d = "M" + "L".join(points) if len(points) > 1 else f"M{points[0]}h0"
                yield f'<path class="{kind}{dashes}" stroke="{curve.colour}" d="{d}" />'
            if curve.marks in ("dots", "line and dots"):
                dots = "".join(f"M{point}h0" for point in points)
                yield f'<path class=dots stroke="{curve.colour}" d="{dots}" />'


def _axes(panel: Panel, x: _Frame, y: _Frame, width: float, height: float) -> str:
    """Draw the grid, the ticks and the titles of both axes, around a plot of ``width`` times ``height`` (px)."""
    parts = []
    for tick in ticks(y.low, y.high, Y_TICKS):
        up = TOP + (1.0 - y.of(tick)) * height
        label = f"{tick:.0%}" if panel.shares else _tick_text(tick, y.high - y.low)
        parts.append(f'<path class=grid d="M{LEFT:g},{up:.1f}h{width:g}" />')
        parts.append(f"<text class=y x={LEFT - 8:g} y={up + 4:.1f}>{label}</text>")
    bottom = TOP + height
    most = max(2, min(X_TICKS, int(width / X_TICK_ROOM)))
    low, high = (x.low, x.high) if panel.origin is None else (panel.origin + x.low, panel.origin + x.high)
    steps = () if panel.origin is None else MINUTES
    for tick in ticks(low, high, most, steps):
        share = x.of(tick - (panel.origin or 0.0))
        label = _tick_text(tick, high - low) if panel.origin is None else _clock(tick, high - low)
        parts.append(
            f"<text class=x data-at={share:.4f} x={LEFT + share * width:.1f} y={bottom + 16:.1f}>{label}</text>"
        )
    parts.append(f'<path class=axis d="M{LEFT:g},{bottom:.1f}h{width:g}" />')
    parts.append(f"<text class=title x={LEFT + width / 2:.1f} y={bottom + 32:.1f}>{html.escape(panel.across)}</text>")
    middle = TOP + height / 2
    turned = f'transform="rotate(-90 12 {middle:.1f})"'
    parts.append(f"<text class=title x=12 y={middle:.1f} {turned}>{html.escape(panel.unit)}</text>")
    return "".join(parts)


def _legend(panel: Panel) -> str:
    if panel.title and len(panel.curves) == 1:
        return ""
    names = "".join(
        f'<span><i style="background:{curve.colour}"></i>{html.escape(curve.name)}</span>' for curve in panel.curves
    )
    return f"<div class=legend>{names}</div>"


def _script_data(panel: Panel, x: _Frame) -> str:
    """Encode the values for the script: JSON, escaped as an HTML attribute."""
    curves = [
        {
            **{"name": curve.name, "colour": curve.colour, "notes": list(curve.notes)},
            **{"x": [_few(x) for x in curve.x], "y": [_few(y, 4) for y in curve.y]},
        }
        for curve in panel.curves
    ]
    data = {"x": [x.low, x.high], "across": panel.across, "origin": panel.origin, "shares": panel.shares}
    return html.escape(json.dumps(data | {"curves": curves}, separators=(",", ":"), allow_nan=False))


def _few(value: float, digits: int = 8) -> float | int:
    few = float(f"{_bounded(value):.{digits}g}")
    return int(few) if few == int(few) and abs(few) < 1e9 else few


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tick_text(tick: float, span: float) -> str:
    """A tick as text, with enough digits to differ from its neighbours."""
    digits = 4 if not tick else math.floor(math.log10(abs(tick))) - math.floor(math.log10(span)) + 3
    if 1e4 <= abs(tick) < 1e15 and digits <= 4:
        return count(tick)
    return f"{tick:.{min(9, max(4, digits))}g}"


def _clock(wall: float, span: float) -> str:
    words = "%m-%d %H:%M" if span > 86400 else "%H:%M:%S" if span < 600 else "%H:%M"
    return datetime.fromtimestamp(wall, UTC).strftime(words)

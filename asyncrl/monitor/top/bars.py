"""Bars and sparklines, as wide as they are asked to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.monitor.bottleneck import KINDS, Kind
from asyncrl.monitor.top.text import Glyphs, Line, Style


def state_bar(kinds: Mapping[Kind, float], width: int, glyphs: Glyphs) -> Line:
    """A bar over all of the time, split by what it was spent on. Shares that add up to 1 fill it exactly."""
    cells = _apportioned([max(0.0, kinds.get(kind, 0.0)) for kind in KINDS], width)
    line: Line = [(glyphs.kinds[kind] * n, kind) for kind, n in zip(KINDS, cells, strict=True) if n]
    filled = sum(cells)
    return line if filled == width else [*line, (" " * (width - filled), "")]


def _apportioned(shares: Sequence[float], width: int) -> list[int]:
    """Cells by largest remainders."""
    whole = sum(shares)
    if whole <= 0:
        return [0] * len(shares)
    exact = [share / whole * width for share in shares]
    cells = [int(each) for each in exact]
    for index in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[: width - sum(cells)]:
        cells[index] += 1
    return cells


def level_bar(value: float | None, limit: float | None, width: int, glyphs: Glyphs, style: Style = "level") -> Line:
    """A bar of how full something is."""
    if value is None or not limit:
        return [(" " * width, "")]
    cells = max(0, min(width, round(value / limit * width)))
    return [(glyphs.level * cells, style), (glyphs.empty * (width - cells), "dim")]


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The newest ``width`` values, between the least and the largest of them."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    # Halved, or the difference of the largest numbers that there are would be infinite.
    low, high = min(shown) / 2, max(shown) / 2
    steps = len(glyphs.spark) - 1
    return "".join(
        glyphs.spark[round((value / 2 - low) / (high - low) * steps) if high > low else 0] for value in shown
    )

"""Styled text, numbers for people, bars and columns. Pure: no terminal is known here.

A line is a list of (text, style). Styles are names: the terminal gives them colours, and everything can be read
without any: bars differ in their glyphs, marks are characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.monitor.bottleneck import KINDS, Kind

Style = Literal["", "dim", "bold", "good", "warn", "bad", "mark", "work", "weights", "upkeep", "start", "wait", "level"]
Span = tuple[str, Style]
Line = list[Span]

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that are drawn with."""

    kinds: Mapping[Kind, str]
    level: str
    empty: str
    spark: str
    rule: str
    strong_rule: str
    arrow: str
    mark: str
    absent: str


UNICODE = Glyphs(
    kinds={"work": "█", "weights": "▓", "upkeep": "▚", "start": "▒", "wait": "░"},
    level="█",
    empty="·",
    spark="▁▂▃▄▅▆▇█",
    rule="─",
    strong_rule="━",
    arrow="→",
    mark="◆",
    absent=ABSENT,
)
ASCII = Glyphs(
    kinds={"work": "#", "weights": "%", "upkeep": "+", "start": "*", "wait": "."},
    level="=",
    empty=".",
    spark="_.-~=+*#",
    rule="-",
    strong_rule="=",
    arrow=">",
    mark="*",
    absent="-",
)


def to_ascii(text: str) -> str:
    """For a terminal that knows no more."""
    for glyph, plain in (
        (ABSENT, ASCII.absent),
        ("…", "~"),
        ("→", ">"),
        ("·", "."),
        ("≥", ">="),
        ("µ", "u"),
        ("▾", "v"),
    ):
        text = text.replace(glyph, plain)
    return text.encode("ascii", "replace").decode()


# --- numbers ---


def count(value: float | None) -> str:
    """12, 3.4k, 1.2M: at most five characters."""
    if value is None:
        return ABSENT
    if abs(value) < 1000:
        return f"{value:.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if abs(value) >= 99.95 else f"{value:.1f}{unit}"
    return f"{value:.0f}P"


def rate(value: float | None) -> str:
    """As ``count``, with decimals where it is small."""
    if value is None or abs(value) >= 99.95:
        return count(value)
    return f"{value:.1f}" if value >= 9.995 or value == 0 else f"{value:.2f}"


def size(value: float | None) -> str:
    """Bytes, in decimal units."""
    if value is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """850 µs, 12 ms, 1.2 s, 12 s, 3m20s, 2h05m, 3d04h."""
    if seconds is None:
        return ABSENT
    if seconds == float("inf"):
        return "long"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def percent(share: float | None) -> str:
    """A share, 0 to 1."""
    return ABSENT if share is None else f"{100 * share:.0f}%"


def fixed(value: float | None, digits: int = 2) -> str:
    """With so many decimals."""
    return ABSENT if value is None else f"{value:.{digits}f}"


# --- drawing ---


def state_bar(kinds: Mapping[Kind, float], width: int, glyphs: Glyphs) -> Line:
    """A bar over all of the time, split by what it was spent on. Shares that add up to 1 fill it exactly."""
    cells = _apportioned([max(0.0, kinds.get(kind, 0.0)) for kind in KINDS], width)
    line: Line = [(glyphs.kinds[kind] * n, kind) for kind, n in zip(KINDS, cells, strict=True) if n]
    filled = sum(cells)
    return line if filled == width else [*line, (" " * (width - filled), "")]


def _apportioned(shares: Sequence[float], width: int) -> list[int]:
    """Cells by largest remainders; a share that is not nothing is seen where there is room."""
    whole = sum(shares)
    if whole <= 0:
        return [0] * len(shares)
    exact = [share / whole * width for share in shares]
    cells = [int(each) for each in exact]
    for index in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[: width - sum(cells)]:
        cells[index] += 1
    return cells


def level_bar(value: float | None, limit: float | None, width: int, glyphs: Glyphs, style: Style = "level") -> Line:
    """How full something is."""
    if value is None or not limit:
        return [(" " * width, "")]
    cells = max(0, min(width, round(value / limit * width)))
    return [(glyphs.level * cells, style), (glyphs.empty * (width - cells), "dim")]


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The newest ``width`` values, between the least and the largest of them."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    steps = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((value - low) / (high - low) * steps) if high > low else 0] for value in shown)


def length(line: Line) -> int:
    """Characters in a line."""
    return sum(len(text) for text, _ in line)


def fit(line: Line, width: int) -> Line:
    """Cut or padded to exactly ``width``."""
    found: Line = []
    left = width
    for text, style in line:
        if len(text) > left:
            found.append((text[: left - 1] + "…" if left > 1 else text[:left], style))
            return found if left else found[:-1]
        found.append((text, style))
        left -= len(text)
    return [*found, (" " * left, "")] if left else found


def plain(line: Line) -> str:
    """Without styles."""
    return "".join(text for text, _ in line)


def joined(parts: Sequence[Line], between: str = "   ") -> Line:
    """Those that are not empty, one after the other."""
    found: Line = []
    for part in parts:
        if part:
            found += [(between, ""), *part] if found else part
    return found


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width``, broken at blanks where there are some."""
    width = max(1, width)
    lines: list[str] = []
    for paragraph in text.splitlines():
        while len(paragraph) > width:
            cut = paragraph.rfind(" ", width // 2, width + 1)
            cut = cut if cut > 0 else width
            lines.append(paragraph[:cut].rstrip())
            paragraph = paragraph[cut:].lstrip()
        lines.append(paragraph)
    return lines


# --- tables ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    width: int = 0
    """At least; so that columns do not move with every figure."""
    most: int = 40
    drop: int = 0
    """Columns with larger numbers go first when there is no room; 0 stays."""
    key: str = ""
    """By which rows are sorted; empty if they cannot be."""


Cell = Span | Line


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``key`` says what it is about."""

    key: str
    cells: Sequence[Cell]
    heading: bool = False
    """Not an entry, but what stands above some."""


NARROW = 100
"""Below this width columns stand one blank apart, else two."""


class Table:
    """Rows in columns, laid out for a width; a row is made into a line when it is asked for."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Row], sorted_by: str = "") -> None:
        self.columns, self.rows, self.sorted_by = columns, rows, sorted_by

    def laid(self, width: int) -> tuple[Line, Callable[[int], Line]]:
        """The line of titles, and a function from a row's number to its line."""
        gap = 1 if width < NARROW else 2
        widths = [self._width(i) for i in range(len(self.columns))]
        shown = list(range(len(widths)))
        while sum(widths[i] + gap for i in shown) - gap > width:
            last = max(shown, key=lambda i: (self.columns[i].drop, i))
            if not self.columns[last].drop:
                break
            shown.remove(last)

        def line_of(cells: Sequence[Cell]) -> Line:
            found: Line = []
            for i in shown:
                cell = cells[i]
                spans: Line = [cell] if isinstance(cell, tuple) else cell
                if i == shown[-1] and not self.columns[i].right:
                    found += spans
                    break
                found += [*_aligned(spans, widths[i], right=self.columns[i].right), (" " * gap, "")]
            return fit(found, width)

        titles: list[Cell] = [(self._title(column), "dim") for column in self.columns]
        return line_of(titles), lambda number: line_of(self.rows[number].cells)

    def _width(self, number: int) -> int:
        column = self.columns[number]
        widest = max((_cell_length(row.cells[number]) for row in self.rows if not row.heading), default=0)
        return max(len(column.title) + bool(column.key), column.width, min(widest, column.most))

    def _title(self, column: Column) -> str:
        return f"{column.title}▾" if column.key and column.key == self.sorted_by else column.title


def _cell_length(cell: Cell) -> int:
    return len(cell[0]) if isinstance(cell, tuple) else length(cell)


def _aligned(spans: Line, width: int, *, right: bool) -> Line:
    missing = width - length(spans)
    if missing <= 0:
        return fit(spans, width)
    return [(" " * missing, ""), *spans] if right else [*spans, (" " * missing, "")]

"""Styled text, and the characters that are drawn with. Pure: no terminal is known here.

A line is a list of (text, style). Styles are names: the terminal gives them colours, and everything can be read
without any: bars differ in their glyphs, marks are characters. Widths are cells of a terminal: some characters take
two, some none. Invariant: text is measured, cut and handed out as it is printed, without controls (printable.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size, split_graphemes

from asyncrl.monitor.bottleneck import Kind
from asyncrl.monitor.numbers import ABSENT
from asyncrl.monitor.printable import printable

Style = Literal[
    "", "dim", "bold", "good", "warn", "bad", "mark", "work", "weights", "upkeep", "start", "wait", "level", "chosen"
]
GAP = 4
"""Blanks between two columns."""
Span = tuple[str, Style]
Line = list[Span]


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


UNICODE = Glyphs(
    kinds={"work": "█", "weights": "▓", "upkeep": "▚", "start": "▒", "wait": "░"},
    level="█",
    empty="·",
    spark="▁▂▃▄▅▆▇█",
    rule="─",
    strong_rule="━",
    arrow="→",
    mark="◆",
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
)


def to_ascii(text: str) -> str:
    """Text for a terminal that knows no more; one character for one, so that no glyph moves."""
    for glyph, plain in (
        (ABSENT, "-"),
        ("…", "~"),
        ("→", ">"),
        ("←", "<"),
        ("↑", "^"),
        ("↓", "v"),
        ("×", "x"),
        ("·", "."),
        ("µ", "u"),
        ("≤", "<"),
        ("±", "~"),
        ("▾", "v"),
        ("▴", "^"),
    ):
        text = text.replace(glyph, plain)
    return text.encode("ascii", "replace").decode()


def cells(text: str) -> int:
    """Cells that a text takes."""
    return len(text) if text.isascii() and text.isprintable() else cell_len(printable(text))


def length(line: Line) -> int:
    """Cells that a line takes."""
    return sum(cells(text) for text, _ in line)


def cut(text: str, width: int) -> str:
    """At most ``width`` cells of a text; where some of it is left out, exactly as many and a mark at the end."""
    text = printable(text)
    if cell_len(text) <= width:
        return text
    return f"{set_cell_size(text, width - 1)}…" if width > 1 else set_cell_size(text, max(0, width))


def fit(line: Line, width: int) -> Line:
    """The line, cut or padded to exactly ``width`` cells."""
    found: Line = []
    left = width
    for text, style in line:
        wide = cells(text)
        if wide > left:
            return [*found, (cut(text, left), style)] if left else found
        found.append((printable(text), style))
        left -= wide
    return [*found, (" " * left, "")] if left else found


def plain(line: Line) -> str:
    """Text of a line, without styles."""
    return "".join(printable(text) for text, _ in line)


def joined(parts: Sequence[Line], between: str = "   ") -> Line:
    """Parts that are not empty, one after the other."""
    found: Line = []
    for part in parts:
        if part:
            found += [(between, ""), *part] if found else part
    return found


def fitting(parts: Sequence[Line], width: int) -> Line:
    """The first parts that stand side by side in this width; there is always one."""
    found = joined(parts[:1])
    for number in range(2, len(parts) + 1):
        line = joined(parts[:number])
        if length(line) > width:
            break
        found = line
    return found


def columns(
    items: Sequence[tuple[str, str, Style]], width: int, *, most: int | None = None, right: bool = False
) -> list[Line]:
    """(name, value, its style), at least one, in as many columns as there is room for, or ``most``, filled downwards.

    ``right``: values end at the same place, and do not begin there.
    """
    name_wide = max(cells(name) for name, _, _ in items)
    value_wide = max(cells(value) for _, value, _ in items)
    across = max(1, (width + GAP) // (name_wide + 2 + value_wide + GAP))
    down = -(-len(items) // (across if most is None else min(across, most)))
    lines: list[Line] = []
    for i in range(down):
        line: Line = []
        for name, value, style in items[i::down]:
            blanks = " " * (value_wide - cells(value))
            shown = f"{blanks}{value}" if right else f"{value}{blanks}"
            between: Line = [(" " * GAP, "")] if line else []
            line += [*between, (f"{name}{' ' * (name_wide - cells(name))}  ", "dim"), (shown, style)]
        lines.append(line)
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` cells, broken at blanks where there are some."""
    width = max(1, width)
    lines: list[str] = []
    for paragraph in map(printable, text.splitlines()):
        while cell_len(paragraph) > width:
            most = _room_for(paragraph, width)
            cut_at = paragraph.rfind(" ", most // 2, most + 1)
            cut_at = cut_at if cut_at > 0 else most
            lines.append(paragraph[:cut_at].rstrip())
            paragraph = paragraph[cut_at:].lstrip()
        lines.append(paragraph)
    return lines


def _room_for(text: str, width: int) -> int:
    """Number of characters of a text that fit into so many cells; one at least."""
    if text.isascii():
        return width
    for start, end, wide in split_graphemes(text[: 4 * width])[0]:
        if wide > width:
            return start or end
        width -= wide
    return max(1, end)

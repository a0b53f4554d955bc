"""Styled text, and the characters that are drawn with. Pure: no terminal is known here.

A line is a list of (text, style). Styles are names: the terminal gives them colours, and everything can be read
without any: bars differ in their glyphs, marks are characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.monitor.bottleneck import Kind
from asyncrl.monitor.top.numbers import ABSENT

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
    """For a terminal that knows no more; one character for one, so that nothing moves."""
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
        ("▾", "v"),
        ("▴", "^"),
    ):
        text = text.replace(glyph, plain)
    return text.encode("ascii", "replace").decode()


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


def columns(
    items: Sequence[tuple[str, str, Style]], width: int, *, most: int | None = None, right: bool = False
) -> list[Line]:
    """(name, value, its style), at least one, in as many columns as there is room for, or ``most``, filled downwards.

    ``right``: values end at the same place, and do not begin there.
    """
    name_wide = max(len(name) for name, _, _ in items)
    value_wide = max(len(value) for _, value, _ in items)
    across = max(1, (width + GAP) // (name_wide + 2 + value_wide + GAP))
    down = -(-len(items) // (across if most is None else min(across, most)))
    lines: list[Line] = []
    for i in range(down):
        line: Line = []
        for name, value, style in items[i::down]:
            shown = f"{value:>{value_wide}}" if right else f"{value:<{value_wide}}"
            between: Line = [(" " * GAP, "")] if line else []
            line += [*between, (f"{name:<{name_wide}}  ", "dim"), (shown, style)]
        lines.append(line)
    return lines


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

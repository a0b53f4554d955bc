"""Lines of the picture: their parts and styles, the characters of bars, and the Rich text that is made of them. Pure.

Invariant: Rich text is made here alone, of printable text (printable.py), so that no terminal obeys what a run says;
for a terminal that knows ASCII alone it is ASCII.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style as RichStyle
from rich.text import Text

from asyncrl.text.numbers import ABSENT
from asyncrl.text.printable import printable
from asyncrl.top.figures.bottleneck import KINDS, Kind

Style = Literal[
    "", "dim", "bold", "good", "warn", "bad", "mark", "work", "weights", "upkeep", "start", "wait", "level", "chosen"
]
STYLES: dict[Style, RichStyle] = {
    "": RichStyle(),
    "dim": RichStyle(color="#8a93a6"),
    "bold": RichStyle(bold=True),
    "good": RichStyle(color="#8fbf7f"),
    "warn": RichStyle(color="#e0b050"),
    "bad": RichStyle(color="#e06c75", bold=True),
    "mark": RichStyle(color="#f0a060", bold=True),
    "work": RichStyle(color="#6aa784"),
    "weights": RichStyle(color="#6b93c9"),
    "upkeep": RichStyle(color="#a585c0"),
    "start": RichStyle(color="#d9b45b"),
    "wait": RichStyle(color="#59617a"),
    "level": RichStyle(color="#7aa2c4"),
    "chosen": RichStyle(color="#f0a060", bold=True, underline=True),
}
GAP = 4
"""Blanks between two columns of facts."""
Span = tuple[str, Style]
Line = list[Span]
_CONSOLE = Console(file=io.StringIO(), width=80)
_TO_ASCII = str.maketrans(dict(zip(f"{ABSENT}…→←↑↓×·µ≤±▾▴", "-~><^vx.u<~v^", strict=True)))


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
    ascii: bool = False
    """Whether all else is to be ASCII, too."""

    def seen(self, text: str) -> str:
        """Text as a terminal may be given it."""
        return to_ascii(printable(text)) if self.ascii else printable(text)


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
    ascii=True,
)


def to_ascii(text: str) -> str:
    """Text for a terminal that knows no more; one character for one, so that no glyph moves."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


# --- Rich text ---


def rich_text(line: Line, glyphs: Glyphs) -> Text:
    """Rich text of a line, as long as it is."""
    found = Text(no_wrap=True)
    for part, style in line:
        found.append(glyphs.seen(part), STYLES[style])
    return found


def fit(line: Line, width: int, glyphs: Glyphs, *, right: bool = False) -> Text:
    """Rich text of exactly ``width`` cells: padded, at its left if it is to end ``right``, or cut, with a mark."""
    found = rich_text(line, glyphs)
    missing = width - found.cell_len
    if missing < 0:
        found.truncate(max(1, width), overflow="ellipsis", pad=True)
        # The mark of what is cut is not ASCII.
        if glyphs.ascii:
            found.plain = to_ascii(found.plain)
        return found if width else Text()
    (found.pad_left if right else found.pad_right)(missing)
    return found


def wrapped(line: Line, width: int, most: int, glyphs: Glyphs) -> list[Text]:
    """Rich text broken into at most so many lines of ``width`` cells; where some of it is left out, with a mark."""
    found = list(rich_text(line, glyphs).wrap(_CONSOLE, max(2, width), no_wrap=False, overflow="fold"))
    if len(found) > most:
        last = found[most - 1]
        last.rstrip()
        last.truncate(width - 2)
        last.append(glyphs.seen(" …"))
    for each in found:
        each.rstrip()
    return found[:most]


# --- parts of lines ---


def length(line: Line) -> int:
    """Cells that a line takes."""
    return sum(len(text) if text.isascii() and text.isprintable() else cell_len(printable(text)) for text, _ in line)


def said(name: str, value: str, style: Style = "") -> Line:
    """A value with its name before it."""
    return [(f"{name} ", "dim"), (value, style)]


def warned(amiss: object, otherwise: Style = "") -> Style:
    """The style of what stands out where something is amiss."""
    return "warn" if amiss else otherwise


def joined(parts: Sequence[Line], between: str = "   ") -> Line:
    """Parts that are not empty, one after the other."""
    found: Line = []
    for part in parts:
        if part:
            found += [(between, ""), *part] if found else part
    return found


def fitting(parts: Sequence[Line], width: int) -> Line:
    """The first parts that stand side by side in this width; there is always one."""
    most = next((n for n in range(len(parts), 1, -1) if length(joined(parts[:n])) <= width), 1)
    return joined(parts[:most])


def columns(
    items: Sequence[tuple[str, str, Style]], width: int, *, most: int | None = None, right: bool = False
) -> list[Line]:
    """(name, value, its style), at least one, in as many columns as there is room for, or ``most``, filled downwards.

    ``right``: values end at the same place, and do not begin there.
    """
    name_wide, value_wide = (max(len(item[i]) for item in items) for i in (0, 1))
    across = max(1, (width + GAP) // (name_wide + 2 + value_wide + GAP))
    down = -(-len(items) // min(across, most or across))

    def entry(name: str, value: str, style: Style) -> Line:
        return [(f"{name:<{name_wide}}  ", "dim"), (f"{value:{'>' if right else '<'}{value_wide}}", style)]

    return [joined([entry(*item) for item in items[i::down]], " " * GAP) for i in range(down)]


# --- bars ---


def state_bar(kinds: Mapping[Kind, float], width: int, glyphs: Glyphs) -> Line:
    """A bar over all of the time, split by what it was spent on. Shares that add up to 1 fill it exactly."""
    shares = [max(0.0, kinds.get(kind, 0.0)) for kind in KINDS]
    if (whole := sum(shares)) <= 0:
        return [(" " * width, "")]
    exact = [share / whole * width for share in shares]
    cells = [int(each) for each in exact]
    # By largest remainders.
    for index in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[: width - sum(cells)]:
        cells[index] += 1
    return [(glyphs.kinds[kind] * n, kind) for kind, n in zip(KINDS, cells, strict=True) if n]


def level_bar(value: float | None, limit: float | None, width: int, glyphs: Glyphs, style: Style = "level") -> Line:
    """A bar of how full something is."""
    if value is None or not limit:
        return [(" " * width, "")]
    cells = max(0, min(width, round(value / limit * width)))
    return [(glyphs.level * cells, style), (glyphs.empty * (width - cells), "dim")]


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The newest ``width`` values, between the least and the largest of them."""
    shown = list(values)[-width:]
    # Halved, or the difference of the largest numbers that there are would be infinite.
    low, high = min(shown, default=0.0) / 2, max(shown, default=0.0) / 2
    steps = len(glyphs.spark) - 1
    return "".join(
        glyphs.spark[round((value / 2 - low) / (high - low) * steps) if high > low else 0] for value in shown
    )

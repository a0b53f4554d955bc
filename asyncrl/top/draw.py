"""Drawing for a width: lines of styled text, bars, and tables that drop columns where there is no room. Pure.

A line is a list of (text, key of STYLES). Invariant: all text of a run passes ``rich_text``, which makes it printable
(core/printable.py). So control characters of a run never reach the terminal.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style as RichStyle
from rich.text import Text

from asyncrl.core.numbers import ABSENT, count
from asyncrl.core.printable import printable
from asyncrl.top.bottleneck import KINDS, Kind, kind_of

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
Span = tuple[str, Style]
Line = list[Span]
BARS: dict[Kind, str] = {"work": "█", "weights": "▓", "upkeep": "▚", "start": "▒", "wait": "░"}
SPARKS = "▁▂▃▄▅▆▇█"
GAP = 4
"""Blanks between two columns of facts."""
_CONSOLE = Console(file=io.StringIO(), width=80)
_TO_ASCII = str.maketrans(
    dict(zip(f"{ABSENT}…→←↑↓×·µ≤±▾▴─━◆█▓▚▒░▁▂▃▄▅▆▇", "-~><^vx.u<~v^-=*#%+*._.-~=+*", strict=True))
)


def to_ascii(text: str) -> str:
    """Text for a terminal that knows only ASCII; one character for one."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


def in_ascii(text: Text) -> Text:
    """Change ``text`` itself for a terminal that knows only ASCII, as wide as before, and return it."""
    cells, text.plain = text.cell_len, to_ascii(text.plain)
    text.truncate(cells, overflow="crop", pad=True)
    return text


# --- Rich text ---


def rich_text(line: Line) -> Text:
    """Rich text of a line, as long as it is."""
    found = Text(no_wrap=True)
    for part, style in line:
        found.append(printable(part), STYLES[style])
    return found


def fit(line: Line, width: int, *, right: bool = False) -> Text:
    """Rich text of exactly ``width`` cells: padded on the right, or on the left if ``right``, or cut with a mark."""
    if width < 1:
        return Text()
    found = rich_text(line)
    found.overflow = "ellipsis"
    found.align("right" if right else "left", width)
    return found


def wrapped(line: Line, width: int, most: int) -> list[Text]:
    """Rich text in at most ``most`` lines of ``width`` cells; the last ends with a mark if some text is left out."""
    found = list(rich_text(line).wrap(_CONSOLE, max(2, width), no_wrap=False, overflow="fold"))
    if len(found) > most:
        last = found[most - 1]
        last.rstrip()
        last.truncate(width - 2)
        last.append(" …")
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


def warned(problem: object, otherwise: Style = "") -> Style:
    """The style of a value that shows a problem, or not."""
    return "warn" if problem else otherwise


def joined(parts: Iterable[Line], between: str = "   ") -> Line:
    """The parts that are not empty, one after the other."""
    found: Line = []
    for part in parts:
        if part:
            found += [(between, ""), *part] if found else part
    return found


def fitting(parts: Iterable[Line], width: int) -> Line:
    """As many of the parts as fit into the width, and the first in any case."""
    shown = [part for part in parts if part]
    while len(shown) > 1 and length(joined(shown)) > width:
        shown.pop()
    return joined(shown)


def columns(
    items: Sequence[tuple[str, str, Style]], width: int, *, right: bool = False, most: int | None = None
) -> list[Line]:
    """Names and values in at most ``most`` columns, down each column first; values on the right if ``right``.

    There must be an item.
    """
    name_wide, value_wide = (max(len(item[i]) for item in items) for i in (0, 1))
    across = max(1, (width + GAP) // (name_wide + 2 + value_wide + GAP))
    down = -(-len(items) // min(across, most or across))

    def entry(name: str, value: str, style: Style) -> Line:
        return [(f"{name:<{name_wide}}  ", "dim"), (f"{value:{'>' if right else '<'}{value_wide}}", style)]

    return [joined([entry(*item) for item in items[i::down]], " " * GAP) for i in range(down)]


# --- bars ---


def state_bar(kinds: Mapping[Kind, float], width: int) -> Line:
    """A bar over all of the time, split by kinds of states. Shares that add up to 1 fill it exactly."""
    shares = [max(0.0, kinds.get(kind, 0.0)) for kind in KINDS]
    if (whole := sum(shares)) <= 0:
        return [(" " * width, "")]
    exact = [share / whole * width for share in shares]
    cells = [int(each) for each in exact]
    # The cells left by rounding down go to the largest remainders.
    for index in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[: width - sum(cells)]:
        cells[index] += 1
    return [(BARS[kind] * n, kind) for kind, n in zip(KINDS, cells, strict=True) if n]


def level_bar(value: float | None, limit: float | None, width: int, style: Style = "level") -> Line:
    """A bar that is as full as ``value`` of ``limit``."""
    if value is None or not limit:
        return [(" " * width, "")]
    cells = max(0, min(width, round(value / limit * width)))
    return [("█" * cells, style), ("·" * (width - cells), "dim")]


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest ``width`` values, between the smallest and the largest of them."""
    shown = list(values)[-width:]
    # The values are halved, because the difference of the largest floats would be infinite.
    low, high = min(shown, default=0.0) / 2, max(shown, default=0.0) / 2
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round((value / 2 - low) / (high - low) * steps) if high > low else 0] for value in shown)


# --- states of actors ---


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can work."""
    return condition in ("ready", "starting", "silent")


def is_amiss(condition: str) -> bool:
    """Whether this condition is a problem."""
    return condition in ("condemned", "dead", "lost", "aside")


def said_state(condition: str, state: str, awaiting: str) -> Span:
    """Words for the state of an actor, with their style."""
    if condition in ("ready", "starting") and state:
        kind = kind_of(state)
        styles: dict[Kind, Style] = {"wait": "dim", "start": "start", "weights": "weights", "upkeep": "upkeep"}
        waits_for = awaiting.removeprefix("weights ") if kind in ("wait", "weights") else ""
        return f"{state} {waits_for}".rstrip(), styles.get(kind, "")
    return condition, "start" if condition in ("starting", "absent") else "bad" if is_amiss(condition) else "dim"


# --- tables ---

NARROW = 100
"""Width below which one blank separates columns, else two."""
Cell = str | Span | Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    cell: Callable[[Any], Cell]
    """Cell of an entry."""
    value: Callable[[Any], Any] | None = None
    """Value of an entry that rows are sorted by; None is unknown."""
    width: int = 0
    """Smallest width, so that columns do not move with every value."""
    drop: int = 0
    """Columns with larger numbers go first when there is no room; a column with 0 stays."""
    most: int = 40
    right: bool = False
    spare: bool = False
    """Whether the column is left out if all its values are unknown."""
    summed: bool = False
    """Whether a heading shows the sum of the rows below it."""


def number(
    title: str,
    value: Callable[[Any], float | None],
    show: Callable[[float | None], str] = count,
    style: Callable[[Any], Style] = lambda entry: "",
    **more: Any,
) -> Column:
    """Make a column of numbers: ``value`` reads that of an entry, ``show`` writes it, ``style`` gives its style."""

    def cell(entry: Any) -> Span:
        return show(value(entry)), style(entry)

    return Column(title=title, cell=cell, value=value, right=True, **more)


@dataclass(frozen=True, slots=True)
class Row:
    """A row. ``key`` is the actor that it is about; a heading has that of the first row below it."""

    key: str
    cells: Sequence[Line]
    heading: bool = False


def row(key: str, cells: Iterable[Cell], *, heading: bool = False) -> Row:
    """The row of these cells; a text alone has no style."""
    lines = [[(cell, "")] if isinstance(cell, str) else [cell] if isinstance(cell, tuple) else cell for cell in cells]
    return Row(key, lines, heading)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns that fit into a width. ``widths`` has the index and the cells, with the gap, of each."""

    widths: tuple[tuple[int, int], ...]
    titles: tuple[str, ...]
    gap: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in columns."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    sorted_by: str = ""
    descending: bool = False
    newest_first: bool = False
    """Whether rows are moments: the cursor stays at its place when newer rows push the others down."""

    def laid(self, width: int) -> TableLayout:
        """Choose the columns that fit into ``width``; columns with the largest ``drop`` go first, those with 0 stay.

        A last column of text takes all the room that is left.
        """
        gap = 1 if width < NARROW else 2
        widths = [self._width(i) for i in range(len(self.columns))]
        shown = [i for i in range(len(widths)) if not (self.columns[i].spare and self._is_unknown(i))]
        while sum(widths[i] + gap for i in shown) - gap > width:
            last = max(shown, key=lambda i: (self.columns[i].drop, i))
            if not self.columns[last].drop:
                break
            shown.remove(last)
        if not self.columns[shown[-1]].right:
            widths[shown[-1]] = max(1, width - sum(widths[i] + gap for i in shown[:-1]))
        titles = [self._title(self.columns[i]) for i in shown]
        # If the column that sorts the rows has no room, the first title names it.
        for i, column in enumerate(self.columns):
            if column.title == self.sorted_by and i not in shown:
                titles[0] = f"by {self._title(column)}"
        return TableLayout(tuple((i, widths[i] + gap * (i != shown[-1])) for i in shown), tuple(titles), gap)

    def heads(self, layout: TableLayout) -> list[Text]:
        """The titles of the columns."""
        return [self._drawn([(title, "dim")], at, layout) for at, title in enumerate(layout.titles)]

    def cell(self, row: Row, at: int, layout: TableLayout) -> Text:
        """The cell of a row in column ``at`` of the layout."""
        return self._drawn(row.cells[layout.widths[at][0]], at, layout)

    def lines(self, width: int, most: int | None = None) -> list[Text]:
        """The table as lines: the titles and at most ``most`` rows."""
        layout = self.laid(width)
        rows = [[self.cell(row, at, layout) for at in range(len(layout.widths))] for row in self.rows[:most]]
        return [Text().join(cells) for cells in [self.heads(layout), *rows]]

    def _drawn(self, cell: Line, at: int, layout: TableLayout) -> Text:
        number, width = layout.widths[at]
        gap = layout.gap if at < len(layout.widths) - 1 else 0
        found = fit(cell, width - gap, right=self.columns[number].right)
        found.pad_right(gap)
        return found

    def _width(self, number: int) -> int:
        column = self.columns[number]
        widest = max((length(row.cells[number]) for row in self.rows if not row.heading), default=0)
        return max(len(self._title(column)), column.width, min(widest, column.most))

    def _title(self, column: Column) -> str:
        return column.title + ("▾" if self.descending else "▴") * (column.title == self.sorted_by)

    def _is_unknown(self, number: int) -> bool:
        return all(row.cells[number][0][0] == ABSENT for row in self.rows if not row.heading)


def table_of(columns: Sequence[Column], entries: Iterable[Any], key: Callable[[Any], str], **more: Any) -> Table:
    """The table of these entries; ``key`` gives the actor that an entry is about."""
    rows = [row(key(entry), (column.cell(entry) for column in columns)) for entry in entries]
    return Table(columns, rows, **more)


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines of a pane, and the table below them, if it has one."""

    head: list[Line] = field(default_factory=list)
    table: Table | None = None
    about: str = ""
    """The actor that the pane as a whole is about."""

    def lines(self, width: int, most: int | None = None) -> list[Text]:
        """All of the pane as lines of this width, with at most ``most`` rows of its table."""
        below = self.table.lines(width, most) if self.table is not None else []
        return [*(fit(line, width) for line in self.head), *below]


# --- the choice of the user ---

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events", "episodes"]
LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The user's choice of order, filter and level of events."""

    sort: str = "host"
    """Title of a column of the rollouters."""
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""

    def matches(self, *texts: str) -> bool:
        """Whether one of the texts holds the needle."""
        return any(self.needle.lower() in text.lower() for text in texts)

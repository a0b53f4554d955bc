"""Parts of a screen that Rich lays out: styled text, lines of facts, bars, tables, panes. Pure.

A pane is a tree of Rich renderables, ``lines`` draws it for a width. Invariant: all text of a run passes ``text``,
which makes it printable (core/formatting.py). So control characters of a run never reach the terminal.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style as RichStyle
from rich.table import Column as GridColumn
from rich.table import Table as Grid
from rich.text import Text

from asyncrl.core.formatting import count, printable
from asyncrl.core.states import FlowKind
from asyncrl.top.bottleneck import kind_of

Style = Literal[
    "", "dim", "bold", "good", "warn", "bad", "mark", "work", "weights", "upkeep", "start", "wait", "level", "chosen"
]
STYLES: dict[Style, RichStyle] = {
    "": RichStyle(),
    "dim": RichStyle(color="#8a93a6"),
    "bold": RichStyle(bold=True),
    "good": RichStyle(color="#8fbf7f"),
    "warn": RichStyle(color="#e0b050"),
    "bad": RichStyle(bold=True, color="#e06c75"),
    "mark": RichStyle(bold=True, color="#f0a060"),
    "work": RichStyle(color="#6aa784"),
    "weights": RichStyle(color="#6b93c9"),
    "upkeep": RichStyle(color="#a585c0"),
    "start": RichStyle(color="#d9b45b"),
    "wait": RichStyle(color="#59617a"),
    "level": RichStyle(color="#7aa2c4"),
    "chosen": RichStyle(bold=True, underline=True, color="#f0a060"),
}
BARS: dict[FlowKind, str] = {"work": "█", "weights": "▓", "upkeep": "▚", "start": "▒", "wait": "░"}
"""The mark of each kind of states, so that kinds differ without colours too."""
_CONSOLE = Console(file=io.StringIO(), width=80, color_system="truecolor", legacy_windows=False)


def lines(renderable: RenderableType, width: int) -> list[Text]:
    """Draw something of Rich as lines of ``width`` cells."""
    drawn = _CONSOLE.render_lines(renderable, _CONSOLE.options.update(width=max(1, width)))
    return [Text.assemble(*((each.text, each.style or "") for each in line)) for line in drawn]


# --- text ---


def text(words: str, style: Style = "", *, wraps: bool = False) -> Text:
    """Text of one line, cut with a mark where it has no room, or of as many lines as it needs if it ``wraps``."""
    found = Text(no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    return found.append(printable(words), STYLES[style])


def labelled(name: str, value: str, style: Style = "") -> Text:
    """A value with its name before it."""
    return text(f"{name} ", "dim") + text(value, style)


def warn_style(problem: object, otherwise: Style = "") -> Style:
    """The style of a value: ``warn`` if there is a ``problem``, else ``otherwise``."""
    return "warn" if problem else otherwise


def joined(*parts: Text, between: str = "   ") -> Text:
    """The parts that are not empty, one after the other."""
    return text(between).join(part for part in parts if part)


def in_columns(facts: Mapping[str, Text]) -> Columns:
    """Names and values in as many columns as fit, down each column first. Empty values are left out."""
    shown = {name: value for name, value in facts.items() if value}
    wide = max(map(len, shown))
    entries = [text(f"{name:<{wide}}  ", "dim") + value for name, value in shown.items()]
    return Columns(entries, padding=(0, 4), column_first=True)


def grid_of(rows: Iterable[Iterable[RenderableType]], *columns: GridColumn, expand: bool = False) -> Grid:
    """Rows of parts in these columns, two blanks apart."""
    grid = Grid.grid(*columns, padding=(0, 2), expand=expand)
    for row in rows:
        grid.add_row(*row)
    return grid


# --- bars ---


def state_bar(kinds: Mapping[FlowKind, float], width: int) -> Text:
    """A bar of ``width`` cells over all of the time, split by kinds of states; empty if no time is known."""
    sizes = [kinds.get(kind, 0.0) for kind in BARS]
    ends = [round(end / whole * width) for end in accumulate(sizes)] if (whole := sum(sizes)) > 0.0 else []
    runs = zip(BARS.items(), [0, *ends], ends, strict=False)
    return text("").join(text(mark * (end - begin), kind) for (kind, mark), begin, end in runs)


def level_bar(value: float | None, limit: float | None, style: Style = "level") -> Bar:
    """A bar that is as full as ``value`` of ``limit``; empty if one of them is unknown."""
    full = value if value is not None and limit else 0.0
    return Bar(limit or 1.0, 0.0, full, color=STYLES[style].color or "default", bgcolor="#313a4b")


# --- states of actors ---


THERE = ("ready", "starting", "silent")
"""Conditions in which an actor can work."""
PROBLEMS = ("condemned", "dead", "lost", "resting")
"""Conditions that stand out. A resting actor died too often and is set aside."""


def state_text(condition: str, state: str, awaiting: str) -> Text:
    """Words for the state of an actor."""
    if condition in ("ready", "starting") and state:
        kind = kind_of(state)
        waits_for = awaiting.removeprefix("weights ") if kind in ("wait", "weights") else ""
        return text(f"{state} {waits_for}".rstrip(), "dim" if kind == "wait" else "" if kind == "work" else kind)
    begins, is_problem = condition in ("starting", "absent"), condition in PROBLEMS
    return text(condition, "start" if begins else "bad" if is_problem else "dim")


# --- tables ---


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. The first columns matter most: a small terminal shows them without scrolling."""

    title: str
    cell: Callable[[Any], Text]
    """Cell of an entry."""
    value: Callable[[Any], Any] | None = None
    """Value of an entry that rows are sorted by; None is unknown."""
    width: int = 0
    """Smallest width, so that columns do not move with every value."""
    most: int = 18
    """Largest width; longer text is cut."""
    right: bool = False
    """Whether the column has numbers, which stand on the right."""
    summed: bool = False
    """Whether a heading shows the sum of the rows below it."""

    def aligned(self, cell: Text) -> Text:
        """The cell with a blank before it, as columns stand side by side."""
        cell.justify = "right" if self.right else "left"
        cell.pad_left(1)
        return cell


def number(
    title: str,
    value: Callable[[Any], float | None],
    show: Callable[[float | None], str] = count,
    style: Callable[[float], Style] = lambda value: "",
    **more: Any,
) -> Column:
    """Make a column of numbers: ``value`` reads that of an entry, ``show`` writes it, ``style`` gives its style."""

    def cell(entry: Any) -> Text:
        found = value(entry)
        return text(show(found), style(found or 0.0))

    return Column(title, cell, value, right=True, **more)


class Row(NamedTuple):
    """A row of a table."""

    key: str
    """The actor that the row is about; a heading has that of the first row below it."""
    cells: Sequence[Text]


def row(key: str, columns: Sequence[Column], cells: Iterable[Text]) -> Row:
    """The row of these cells."""
    return Row(key, [column.aligned(cell) for cell, column in zip(cells, columns, strict=True)])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in columns."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    newest_first: bool = False
    """Whether rows are moments: the cursor stays at its place when newer rows push the others down."""

    def laid(self) -> list[tuple[Text, int]]:
        """Title of each column, and its width in cells, with the blank before it."""
        found = []
        for at, column in enumerate(self.columns):
            title = column.aligned(text(column.title, "dim"))
            longest = max((row.cells[at].cell_len for row in self.rows), default=0)
            found.append((title, max(title.cell_len, column.width + 1, min(column.most + 1, longest))))
        return found

    def __rich__(self) -> Grid:
        laid = self.laid()
        grid = Grid.grid(*(GridColumn(width=width, no_wrap=True) for _, width in laid))
        for cells in ([title for title, _ in laid], *(row.cells for row in self.rows)):
            grid.add_row(*cells)
        return grid


def table_of(columns: Sequence[Column], entries: Iterable[Any], key: Callable[[Any], str], **more: Any) -> Table:
    """The table of these entries; ``key`` gives the actor that an entry is about."""
    rows = [row(key(entry), columns, (column.cell(entry) for column in columns)) for entry in entries]
    return Table(columns, rows, **more)


@dataclass(frozen=True, slots=True)
class Pane:
    """The content of a pane, and the table below it, if it has one."""

    head: Sequence[RenderableType] = ()
    table: Table | None = None
    about: str = ""
    """The actor that the pane as a whole is about."""


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
    """Text that a row must hold, in any case of letters, to be shown; empty shows all rows."""
    level: str = "info"
    """Events of this level and above."""

    def matches(self, *texts: str) -> bool:
        """Whether one of the texts of a row holds the needle."""
        return any(self.needle.lower() in text.lower() for text in texts)

"""Parts of all panes: the choice of the user, lines above a table, and a table laid out for a width. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.text import Text

from asyncrl.text.numbers import ABSENT
from asyncrl.top.drawing.text import Glyphs, Line, Span, Style, columns, fit, length
from asyncrl.top.figures.bottleneck import kind_of

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events", "episodes"]
LEVELS = ("info", "warning", "error")
BAR = 8
"""Cells of a bar in a table."""
NARROW = 100
"""Width below which columns stand one blank apart, else two."""
Cell = Span | Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice of the user: the order, the filter and the level of events."""

    sort: str = "host"
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    width: int = 0
    """Least width; so that columns do not move with every figure."""
    most: int = 40
    drop: int = 0
    """Columns with larger numbers go first when there is no room; 0 stays."""
    spare: bool = False
    """Whether it is left out where nothing is known of it."""
    key: str = ""
    """Key by which rows are sorted; empty if they cannot be."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``key`` is the actor that it is about, of a heading the first below it."""

    key: str
    cells: Sequence[Cell]
    heading: bool = False
    """Whether it is no entry, but stands above some."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Columns that there is room for: their numbers and widths, which hold the blanks between two, and their titles."""

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

    def laid(self, width: int) -> TableLayout:
        """The layout for a width."""
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
        for i, column in enumerate(self.columns):
            if column.key and column.key == self.sorted_by and i not in shown:
                titles[0] = f"by {self._title(column)}"
        return TableLayout(tuple((i, widths[i] + gap * (i != shown[-1])) for i in shown), tuple(titles), gap)

    def heads(self, layout: TableLayout, glyphs: Glyphs) -> list[Text]:
        """The titles of the columns."""
        return [self._drawn((title, "dim"), at, layout, glyphs) for at, title in enumerate(layout.titles)]

    def cell(self, row: Row, at: int, layout: TableLayout, glyphs: Glyphs) -> Text:
        """The cell of a row in column ``at`` of the layout."""
        return self._drawn(row.cells[layout.widths[at][0]], at, layout, glyphs)

    def lines(self, width: int, glyphs: Glyphs, most: int | None = None) -> list[Text]:
        """The table as lines, with the titles and no more than so many rows."""
        layout, end = self.laid(width), Text()
        rows = [[self.cell(row, at, layout, glyphs) for at in range(len(layout.widths))] for row in self.rows[:most]]
        return [end.join(cells) for cells in [self.heads(layout, glyphs), *rows]]

    def _drawn(self, cell: Cell, at: int, layout: TableLayout, glyphs: Glyphs) -> Text:
        number, width = layout.widths[at]
        gap = layout.gap if at < len(layout.widths) - 1 else 0
        found = fit(_spans(cell), width - gap, glyphs, right=self.columns[number].right)
        found.pad_right(gap)
        return found

    def _width(self, number: int) -> int:
        column = self.columns[number]
        widest = max((length(_spans(row.cells[number])) for row in self.rows if not row.heading), default=0)
        return max(len(self._title(column)), column.width, min(widest, column.most))

    def _title(self, column: Column) -> str:
        mark = "▾" if self.descending else "▴"
        return f"{column.title}{mark}" if column.key and column.key == self.sorted_by else column.title

    def _is_unknown(self, number: int) -> bool:
        return all(row.cells[number][0] == ABSENT for row in self.rows if not row.heading)


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines of a pane, and the table below them, if it has one."""

    head: list[Line] = field(default_factory=list)
    table: Table | None = None
    about: str = ""
    """Actor that the pane is about as a whole."""

    @property
    def keys(self) -> list[str]:
        """Actors that the rows are about."""
        return [row.key for row in self.table.rows] if self.table is not None else []

    def lines(self, width: int, glyphs: Glyphs, most: int | None = None) -> list[Text]:
        """All of the pane, or no more than so many rows of it, as lines of this width."""
        below = self.table.lines(width, glyphs, most) if self.table is not None else []
        return [*(fit(line, width, glyphs) for line in self.head), *below]


def _spans(cell: Cell) -> Line:
    return [cell] if isinstance(cell, tuple) else cell


def matches(choice: Choice, *texts: str) -> bool:
    """Whether one of the texts holds the needle."""
    needle = choice.needle.lower()
    return not needle or any(needle in text.lower() for text in texts)


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can do anything."""
    return condition in ("ready", "starting", "silent")


def is_amiss(condition: str) -> bool:
    """Whether an actor should be otherwise."""
    return condition in ("condemned", "dead", "lost", "aside")


def said_state(condition: str, state: str, awaiting: str) -> Span:
    """Words for what an actor does, with their style."""
    if condition in ("ready", "starting") and state:
        kind = kind_of(state)
        styles: dict[str, Style] = {"wait": "dim", "start": "start", "weights": "weights", "upkeep": "upkeep"}
        whom = awaiting.removeprefix("weights ") if kind in ("wait", "weights") else ""
        return f"{state} {whom}".rstrip(), styles.get(kind, "")
    return condition, "start" if condition in ("starting", "absent") else "bad" if is_amiss(condition) else "dim"


def facts(known: Sequence[tuple[str, str, Style]], bars: Sequence[Line], width: int, about: str) -> Pane:
    """Names and values in as many columns as there is room for, filled downwards, below ``bars``."""
    return Pane([*bars, *columns(known, width, most=3)], about=about)

"""Parts of all panes: the choice of the user, lines above a table, and a table laid out for a width. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.text import Text

from asyncrl.text.numbers import ABSENT
from asyncrl.top.drawing.text import Glyphs, Line, Span, fit, length

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events", "episodes"]
LEVELS = ("info", "warning", "error")
NARROW = 100
"""Width below which columns stand one blank apart, else two."""
Cell = str | Span | Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice of the user: the order, the filter and the level of events."""

    sort: str = "host"
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""

    def matches(self, *texts: str) -> bool:
        """Whether one of the texts holds the needle."""
        return any(self.needle.lower() in text.lower() for text in texts)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    of: Callable[[Any, Glyphs], Cell]
    """Cell of an entry."""
    width: int = 0
    """Least width; so that columns do not move with every figure."""
    drop: int = 0
    """Columns with larger numbers go first when there is no room; 0 stays."""
    key: str = ""
    """Key by which rows are sorted; empty if they cannot be."""
    most: int = 40
    right: bool = False
    spare: bool = False
    """Whether it is left out where nothing is known of it."""


def number(
    title: str, of: Callable[[Any], Cell], width: int = 0, drop: int = 0, key: str = "", *, spare: bool = False
) -> Column:
    """A column of numbers."""
    return Column(title, lambda entry, _: of(entry), width, drop, key, right=True, spare=spare)


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``key`` is the actor that it is about, of a heading the first below it."""

    key: str
    cells: Sequence[Line]
    heading: bool = False
    """Whether it is no entry, but stands above some."""


def row(key: str, cells: Iterable[Cell], *, heading: bool = False) -> Row:
    """The row of these cells; a text alone has no style."""
    lines = [[(cell, "")] if isinstance(cell, str) else [cell] if isinstance(cell, tuple) else cell for cell in cells]
    return Row(key, lines, heading)  # type: ignore[arg-type]


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
    newest_first: bool = False
    """Whether the rows are of moments: the cursor stays at its place when newer ones push the others down."""

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
        # Where the column that sorts the rows has no room, the first title names it.
        for i, column in enumerate(self.columns):
            if column.key and column.key == self.sorted_by and i not in shown:
                titles[0] = f"by {self._title(column)}"
        return TableLayout(tuple((i, widths[i] + gap * (i != shown[-1])) for i in shown), tuple(titles), gap)

    def heads(self, layout: TableLayout, glyphs: Glyphs) -> list[Text]:
        """The titles of the columns."""
        return [self._drawn([(title, "dim")], at, layout, glyphs) for at, title in enumerate(layout.titles)]

    def cell(self, row: Row, at: int, layout: TableLayout, glyphs: Glyphs) -> Text:
        """The cell of a row in column ``at`` of the layout."""
        return self._drawn(row.cells[layout.widths[at][0]], at, layout, glyphs)

    def lines(self, width: int, glyphs: Glyphs, most: int | None = None) -> list[Text]:
        """The table as lines, with the titles and no more than so many rows."""
        layout = self.laid(width)
        rows = [[self.cell(row, at, layout, glyphs) for at in range(len(layout.widths))] for row in self.rows[:most]]
        return [Text().join(cells) for cells in [self.heads(layout, glyphs), *rows]]

    def _drawn(self, cell: Line, at: int, layout: TableLayout, glyphs: Glyphs) -> Text:
        number, width = layout.widths[at]
        gap = layout.gap if at < len(layout.widths) - 1 else 0
        found = fit(cell, width - gap, glyphs, right=self.columns[number].right)
        found.pad_right(gap)
        return found

    def _width(self, number: int) -> int:
        column = self.columns[number]
        widest = max((length(row.cells[number]) for row in self.rows if not row.heading), default=0)
        return max(len(self._title(column)), column.width, min(widest, column.most))

    def _title(self, column: Column) -> str:
        mark = "▾" if self.descending else "▴"
        return f"{column.title}{mark}" if column.key and column.key == self.sorted_by else column.title

    def _is_unknown(self, number: int) -> bool:
        return all(row.cells[number][0][0] == ABSENT for row in self.rows if not row.heading)


def row_of(columns: Sequence[Column], entry: Any, key: str, glyphs: Glyphs) -> Row:
    """The row of an entry in these columns."""
    return row(key, (column.of(entry, glyphs) for column in columns))


def table_of(columns: Sequence[Column], entries: Iterable[Any], glyphs: Glyphs) -> Table:
    """The table of entries that are actors."""
    return Table(columns, [row_of(columns, entry, entry.name, glyphs) for entry in entries])


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines of a pane, and the table below them, if it has one."""

    head: list[Line] = field(default_factory=list)
    table: Table | None = None
    about: str = ""
    """Actor that the pane is about as a whole."""

    def lines(self, width: int, glyphs: Glyphs, most: int | None = None) -> list[Text]:
        """All of the pane, or no more than so many rows of it, as lines of this width."""
        below = self.table.lines(width, glyphs, most) if self.table is not None else []
        return [*(fit(line, width, glyphs) for line in self.head), *below]

"""Tables: rows in columns, laid out for a width, each row made into a line when it is asked for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.monitor.numbers import ABSENT
from asyncrl.monitor.top.text import Line, Span, cells, fit, length


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


Cell = Span | Line


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``key`` says what it is about."""

    key: str
    cells: Sequence[Cell]
    heading: bool = False
    """Whether it is no entry, but stands above some."""


NARROW = 100
"""Below this width columns stand one blank apart, else two."""


class Table:
    """Rows in columns, laid out for a width; a row is made into a line when it is asked for."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Row], sorted_by: str = "", *, descending: bool = False
    ) -> None:
        self.columns, self.rows, self.sorted_by = columns, rows, sorted_by
        self._mark = "▾" if descending else "▴"

    def laid(self, width: int) -> tuple[Line, Callable[[int], Line]]:
        """The line of titles, and a function from a row's number to its line."""
        gap = 1 if width < NARROW else 2
        widths = [self._width(i) for i in range(len(self.columns))]
        shown = [i for i in range(len(widths)) if not (self.columns[i].spare and self._is_unknown(i))]
        while sum(widths[i] + gap for i in shown) - gap > width:
            last = max(shown, key=lambda i: (self.columns[i].drop, i))
            if not self.columns[last].drop:
                break
            shown.remove(last)

        def line_of(row: Sequence[Cell]) -> Line:
            found: Line = []
            for i in shown:
                cell = row[i]
                spans: Line = [cell] if isinstance(cell, tuple) else cell
                if i == shown[-1] and not self.columns[i].right:
                    found += spans
                    break
                found += [*_aligned(spans, widths[i], right=self.columns[i].right), (" " * gap, "")]
            return fit(found, width)

        titles: list[Cell] = [(self._title(column), "dim") for column in self.columns]
        hidden = [i for i, column in enumerate(self.columns) if column.key == self.sorted_by and i not in shown]
        if hidden and self.sorted_by:
            titles[shown[0]] = (f"by {self._title(self.columns[hidden[0]])}", "dim")
        return line_of(titles), lambda number: line_of(self.rows[number].cells)

    def _width(self, number: int) -> int:
        column = self.columns[number]
        widest = max((_cell_length(row.cells[number]) for row in self.rows if not row.heading), default=0)
        return max(len(self._title(column)), column.width, min(widest, column.most))

    def _title(self, column: Column) -> str:
        return f"{column.title}{self._mark}" if column.key and column.key == self.sorted_by else column.title

    def _is_unknown(self, number: int) -> bool:
        return all(row.cells[number][0] == ABSENT for row in self.rows if not row.heading)


def _cell_length(cell: Cell) -> int:
    return cells(cell[0]) if isinstance(cell, tuple) else length(cell)


def _aligned(spans: Line, width: int, *, right: bool) -> Line:
    missing = width - length(spans)
    if missing <= 0:
        return fit(spans, width)
    return [(" " * missing, ""), *spans] if right else [*spans, (" " * missing, "")]

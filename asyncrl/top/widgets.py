"""The widgets of asyncrl-top: scrolling lines, panes with a table and cursor, screens with a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Static

from asyncrl.top.draw import Pane, Row, Table, joined, text


class Lines(VerticalScroll):
    """Lines that scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
    ]

    def __init__(self, *content: RenderableType, id: str | None = None) -> None:
        self._content = Static(Group(*content))
        super().__init__(self._content, id=id, classes="lines")

    def show(self, *content: RenderableType) -> None:
        self._content.update(Group(*content))


class Rows(DataTable[Text]):
    """The rows of a table. Only changed cells are drawn again, and the cursor stays with its actor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
        Binding("shift+left", "scroll_left", show=False),
        Binding("shift+right", "scroll_right", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, fixed_columns=1, cursor_foreground_priority="renderable")
        self._shown: list[Row] = []
        """Rows on the screen."""
        self._laid: list[tuple[Text, int]] = []
        """Title and width (cells) of each column on the screen."""

    @property
    def chosen(self) -> str:
        """Actor that the row under the cursor is about; empty if it is about nothing."""
        # A key may have moved the cursor to -1 while there was no row.
        return self._shown[self.cursor_row].key if 0 <= self.cursor_row < len(self._shown) else ""

    def show(self, table: Table) -> None:
        """Show a table: make new columns if the layout has changed, else draw only the changed cells."""
        # A column gets no narrower, so that the table keeps its place when a value gets shorter.
        chosen, widths = self.chosen, {title.plain: width for title, width in self._laid}
        laid = [(title, max(width, widths.get(title.plain, 0))) for title, width in table.laid()]
        if laid != self._laid:
            self.clear(columns=True)
            for title, width in laid:
                self.add_column(title, width=width)
            self._laid, self._shown = laid, []
        old = self._shown
        for number, row in enumerate(table.rows):
            if number >= len(old):
                self.add_row(*row.cells)
                continue
            for at, cell in enumerate(row.cells):
                if cell != old[number].cells[at]:
                    self.update_cell_at((number, at), cell)  # type: ignore[arg-type]
        for _ in old[len(table.rows) :]:
            self.remove_row(self.ordered_rows[-1].key)
        self._shown = list(table.rows)
        keys = [row.key for row in table.rows]
        if not table.newest_first and chosen in keys and self.chosen != chosen:
            # Take the last row with this key, because a heading has the key of the first row below it.
            self.move_cursor(row=len(keys) - 1 - keys[::-1].index(chosen))


class PaneView(Vertical):
    """A pane: lines, and below them the rows of its table."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", show=False)]

    def __init__(self, name: str, choose: Callable[[str], None]) -> None:
        """``choose`` gets the actor of an entry."""
        self._lines, self._rows, self._about = Lines(), Rows(), ""
        super().__init__(self._lines, self._rows, id=name, classes="pane")
        self._choose = choose

    def show(self, pane: Pane) -> None:
        self._about = pane.about
        self._lines.show(*pane.head)
        self._lines.display = bool(pane.head)
        self._rows.display = pane.table is not None and bool(pane.table.rows)
        self.set_class(not self._rows.display, "alone")
        if pane.table is not None:
            self._rows.show(pane.table)

    def focus_entries(self) -> None:
        """Let keys go to what scrolls."""
        (self._rows if self._rows.display else self._lines).focus()

    def action_choose(self) -> None:
        """Choose the actor that the row is about, or the pane."""
        if key := (self._rows.display and self._rows.chosen) or self._about:
            self._choose(key)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        self.action_choose()


class PageScreen(Screen[None]):
    """A screen with a title and lines that scroll; escape leads back, n and p call a subclass's ``action_other``."""

    CSS = """
    #name { height: 1; background: $panel; padding: 0 1; }
    #page { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "app.pop_screen", show=False),
        Binding("n", "other(1)", show=False),
        Binding("p", "other(-1)", show=False),
    ]

    keys: ClassVar[str]
    """Hints of the keys, after the title."""

    def __init__(self) -> None:
        super().__init__()
        self._head, self._page = Static(id="name"), Lines(id="page")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._page

    def show_title(self, title: str) -> None:
        self._head.update(joined(text(title, "bold"), text(self.keys, "dim")))

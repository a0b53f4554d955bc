"""The widgets of asyncrl-top: blocks of lines, panes with a table and its cursor, screens with a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Static

from asyncrl.top.draw import Facts, Pane, Row, Table, in_ascii, lines, text

SIDES = 3
"""Columns that padding and scrollbar take."""


class Block(Static):
    """A block of lines, which is drawn again only when a line changes."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._lines: list[Text] = []

    def show(self, renderable: RenderableType, width: int) -> int:
        """Draw for this width, and return the number of lines."""
        drawn = lines(renderable, width)
        if is_ascii_only(self):
            drawn = [in_ascii(line) for line in drawn]
        if drawn != self._lines:
            self.update(Text("\n").join(drawn), layout=len(drawn) != len(self._lines))
            self._lines = drawn
        return len(drawn)


def is_ascii_only(widget: Widget) -> bool:
    """Whether the terminal knows only ASCII."""
    return bool(getattr(widget.app, "ascii_only", False))


class Lines(VerticalScroll):
    """Lines that scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        self._block = Block()
        super().__init__(self._block, id=id, classes=classes)

    def show(self, renderable: RenderableType, width: int) -> int:
        """Draw for this width, and return the number of lines."""
        return self._block.show(renderable, width)


class Rows(DataTable[Text]):
    """The rows of a table. Only changed cells are drawn again, and the cursor stays with its actor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, show_cursor=False)
        self._shown: list[Row] = []
        self._laid: list[tuple[int, Text, int]] = []

    @property
    def chosen(self) -> str:
        """Actor that the row under the cursor is about; empty if it is about nothing."""
        # A key may have moved the cursor to -1 while there was no row.
        return self._shown[self.cursor_row].key if 0 <= self.cursor_row < len(self._shown) else ""

    def show(self, table: Table, width: int) -> None:
        """Show a table: make new columns if the layout has changed, else draw only the changed cells."""
        chosen, laid = self.chosen, table.laid(width)
        shown_as = in_ascii if is_ascii_only(self) else Text.copy
        if laid != self._laid:
            self.clear(columns=True)
            for _, title, cells in laid:
                self.add_column(shown_as(title), width=cells)
            self._laid, self._shown = laid, []
        old = self._shown
        for number, row in enumerate(table.rows):
            if number >= len(old):
                self.add_row(*(shown_as(row.cells[index]) for index, _, _ in laid))
                continue
            for at, (index, _, _) in enumerate(laid):
                if row.cells[index] != old[number].cells[index]:
                    cell = shown_as(row.cells[index])
                    self.update_cell_at((number, at), cell)  # type: ignore[arg-type]
        for _ in old[len(table.rows) :]:
            self.remove_row(self.ordered_rows[-1].key)
        self._shown = list(table.rows)
        keys = [row.key for row in table.rows]
        if not table.newest_first and chosen in keys and self.chosen != chosen:
            # Take the last row with this key, because a heading has the key of the first row below it.
            self.move_cursor(row=len(keys) - 1 - keys[::-1].index(chosen))

    def watch_has_focus(self, has_focus: bool) -> None:
        """The cursor is seen where keys go."""
        self.show_cursor = has_focus
        super().watch_has_focus(has_focus)


class PaneView(Vertical):
    """A pane: lines, and below them the rows of its table."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", show=False)]

    def __init__(self, name: str, choose: Callable[[str], None], draw: Callable[[], None]) -> None:
        """``choose`` gets the actor of an entry; ``draw`` is called after a change of width."""
        self._lines, self._rows, self._about = Lines(classes="lines"), Rows(), ""
        super().__init__(self._lines, self._rows, id=name, classes="pane")
        self._choose, self._draw = choose, draw

    @property
    def room(self) -> int:
        """Width of a line, without the scrollbar."""
        return self.size.width - 1

    def show(self, pane: Pane, *, tall: bool) -> None:
        """Draw the pane. A ``tall`` one fills the room; another is as high as its content."""
        self._about = pane.about
        table = pane.table if pane.table is not None and pane.table.rows else None
        above = self._lines.show(Group(*pane.head), self.room) if pane.head else 0
        self._lines.display = bool(pane.head)
        self._rows.display = table is not None
        self.set_class(table is None, "alone")
        if table is not None:
            self._rows.show(table, self.room)
        below = len(table.rows) + 1 if table is not None else 0
        self.styles.height = None if tall else 2 + above + below

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

    def on_resize(self, event: Resize) -> None:
        """Lines depend on the width."""
        self.call_after_refresh(self._draw)


class PageScreen(Screen[None]):
    """A screen with a title and lines that scroll; escape leads back."""

    CSS = """
    #name { height: 1; background: #252b37; padding: 0 1; }
    #page { height: 1fr; padding: 0 0 0 1; }
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
        self._head, self._page = Block(id="name"), Lines(id="page", classes="lines")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._page

    @property
    def room(self) -> int:
        """Width of a line."""
        return max(1, self.size.width - SIDES)

    def show_title(self, title: str) -> None:
        self._head.show(Facts(text(title, "bold"), text(self.keys, "dim")), self.room)

    def show_page(self, renderable: RenderableType) -> None:
        self._page.show(renderable, self.room)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw the page for the present width."""

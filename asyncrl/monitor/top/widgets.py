"""The two widgets of asyncrl-top: lines, and a pane that scrolls. Both draw only lines that changed."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from asyncrl.monitor.top.panes.base import Pane
from asyncrl.monitor.top.text import Line, Style, fit, to_ascii

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
CURSOR = RichStyle(reverse=True)


def to_strip(line: Line, width: int, base: RichStyle, *, ascii_only: bool, cursor: bool = False) -> Strip:
    """A line of exactly ``width`` cells, on ``base``."""
    if ascii_only:
        # Before it is measured: a character of two cells is one there. The mark of a cut comes after.
        line = [(to_ascii(text), name) for text, name in line]
        line = [(to_ascii(text), name) for text, name in fit(line, width)]
    segments = [Segment(text, base + (CURSOR if cursor else STYLES[name])) for text, name in fit(line, width)]
    return Strip(segments, width)


class Block(Widget):
    """Lines as they are given."""

    def __init__(self, *, ascii_only: bool, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii = ascii_only
        self._lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Draw the lines."""
        old, self._lines = self._lines, lines
        for number in range(max(len(old), len(lines))):
            if old[number : number + 1] != lines[number : number + 1]:
                self.refresh(Region(0, number, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else []
        return to_strip(line, self.size.width, self.rich_style, ascii_only=self._ascii)


class PaneView(ScrollView, can_focus=True):
    """A pane: its head stays, its entries scroll below it, and a cursor goes through them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """An entry was chosen; ``key`` is what it is about."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class Resized(Message):
        """The pane has another width."""

    def __init__(self, *, ascii_only: bool, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii = ascii_only
        self._pane = Pane([])
        self._cursor = 0
        self._drawn: list[Line | None] = []
        """Lines that stand on the screen, by row."""

    def show(self, pane: Pane) -> None:
        """Draw the pane."""
        key = self.chosen
        self._pane = pane
        # The cursor stays with what it was on, wherever that is sorted to.
        if key and self.chosen != key and key in pane.keys:
            self._cursor = list(pane.keys).index(key)
        self._cursor = max(0, min(self._cursor, len(pane.keys) - 1))
        self._cursor = self._entry_from(self._cursor, 1)
        size = Size(self.room, len(pane.head) + len(pane.keys))
        if size != self.virtual_size:
            self.virtual_size = size
        self._redraw()

    @property
    def room(self) -> int:
        """Width of a line."""
        return self.scrollable_content_region.width

    @property
    def chosen(self) -> str:
        """Actor that the entry under the cursor is about; empty if it is about nothing."""
        keys = self._pane.keys
        return keys[self._cursor] if self._cursor < len(keys) else ""

    def _entry_from(self, number: int, by: int) -> int:
        """The first entry from ``number`` on, in this direction, that can be chosen; else the cursor's own."""
        keys = self._pane.keys
        while 0 <= number < len(keys) and not keys[number]:
            number += 1 if by > 0 else -1
        return number if 0 <= number < len(keys) else self._cursor

    def _line_at(self, y: int) -> Line:
        head = self._pane.head
        if y < len(head):
            return head[y]
        number = y - len(head) + self.scroll_offset.y
        return self._pane.line(number) if number < len(self._pane.keys) else []

    def _cursor_y(self) -> int:
        if not self.has_focus or not self.chosen:
            return -1
        return len(self._pane.head) + self._cursor - self.scroll_offset.y

    def _redraw(self) -> None:
        drawn = self._drawn
        for y in range(self.size.height):
            # A line that is not known is not known either to be drawn.
            if y >= len(drawn) or self._line_at(y) != drawn[y]:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        line = self._line_at(y)
        while len(self._drawn) <= y:
            self._drawn.append(None)
        self._drawn[y] = line
        cursor = y == self._cursor_y() and y >= len(self._pane.head)
        return to_strip(line, self.room, self.rich_style, ascii_only=self._ascii, cursor=cursor)

    def action_move(self, by: int) -> None:
        """Move the cursor; without entries that can be chosen, scroll."""
        keys = self._pane.keys
        if not any(keys):
            self.scroll_relative(y=by, animate=False)
            return
        self._cursor = self._entry_from(max(0, min(self._cursor + by, len(keys) - 1)), by)
        height = self.size.height - len(self._pane.head)
        top = self.scroll_offset.y
        # The headings above the entry come with it.
        first = self._cursor
        while first and not keys[first - 1]:
            first -= 1
        if first < top:
            self.scroll_to(y=first, animate=False)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False)
        self.refresh()

    def action_page(self, by: int) -> None:
        """Move by a screenful."""
        self.action_move(by * max(1, self.size.height - len(self._pane.head) - 1))

    def action_choose(self) -> None:
        """Choose the entry under the cursor, or the actor that the pane is about."""
        if key := self.chosen or self._pane.about:
            self.post_message(self.Chosen(key))

    def on_click(self, event: Click) -> None:
        """Put the cursor there; a second click chooses."""
        number = event.y - len(self._pane.head) + self.scroll_offset.y
        if 0 <= number < len(self._pane.keys) and self._pane.keys[number]:
            self._cursor = number
            self.refresh()
            if event.chain == 2:
                self.action_choose()

    def watch_show_vertical_scrollbar(self, shown: bool) -> None:
        """Draw anew: the scrollbar takes a column."""
        self._drawn = []
        self.post_message(self.Resized())

    def on_resize(self, event: Resize) -> None:
        """Draw anew: lines depend on the width."""
        self._drawn = []
        self.post_message(self.Resized())

    def on_focus(self) -> None:
        """The cursor appears."""
        self.refresh()

    def on_blur(self) -> None:
        """The cursor disappears."""
        self.refresh()

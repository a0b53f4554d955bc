"""Screens over the panes: the keys, and an actor in detail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen

from asyncrl.monitor.top.detail import detail
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.layout import help_lines
from asyncrl.monitor.top.log_tail import last_lines
from asyncrl.monitor.top.panes.base import Pane
from asyncrl.monitor.top.text import Glyphs, Line
from asyncrl.monitor.top.widgets import Block, PaneView

LOG_S = 2.0
"""Time between two reads of the end of a log (s)."""


class HelpScreen(ModalScreen[None]):
    """Screen of the keys."""

    CSS = """
    HelpScreen { align: center middle; }
    #help { width: 76; max-width: 100%; height: 22; max-height: 100%; scrollbar-size-vertical: 1;
        border: round #7aa2c4; background: #252b37; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,h,enter,space", "app.pop_screen", show=False)
    ]

    def __init__(self, glyphs: Glyphs, *, ascii_only: bool) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._view = PaneView(ascii_only=ascii_only, id="help")

    def compose(self) -> ComposeResult:
        yield self._view

    def on_mount(self) -> None:
        """Draw."""
        self._view.focus()
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw for the width that there is."""
        lines: list[Line] = [[(line, "")] for line in help_lines(self._view.room, self._glyphs.kinds)]
        self._view.show(Pane([], [""] * len(lines), lambda number: lines[number]))

    def on_pane_view_resized(self, event: PaneView.Resized) -> None:
        """Draw for the new width."""
        event.stop()
        self.call_after_refresh(self.draw)


class DetailScreen(Screen[None]):
    """An actor of the document that is seen, as long as it is looked at."""

    CSS = """
    #name { height: 1; background: #252b37; padding: 0 1; }
    #detail { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "app.pop_screen", show=False),
        Binding("n", "other(1)", show=False),
        Binding("p", "other(-1)", show=False),
    ]

    def __init__(
        self,
        actor: str,
        document: Callable[[], Document | None],
        run_dir: Path | None,
        glyphs: Glyphs,
        *,
        past: bool,
        ascii_only: bool,
    ) -> None:
        """``past``: the document is of a moment that is over, as in a replay, and so the log is to be."""
        super().__init__()
        self._actor, self._document, self._run_dir, self._glyphs = actor, document, run_dir, glyphs
        self._past = past
        self._log: Sequence[str] | None = None
        self._log_until: float | None = None
        self._top = Block(ascii_only=ascii_only, id="name")
        self._view = PaneView(ascii_only=ascii_only, id="detail")

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._view

    def on_mount(self) -> None:
        """Draw, and read the log from time to time."""
        self._read_log()
        self.set_interval(LOG_S, self._read_log)
        self.call_after_refresh(self.draw)

    @work(thread=True, exclusive=True)
    def _read_log(self) -> None:
        document, actor = self._document(), self._actor
        if document is not None and self._run_dir is not None:
            self._log_until = document.wall if self._past else None
            log = last_lines(self._run_dir, document.run.attempt, actor, self._log_until)
            self.app.call_from_thread(self._take_log, actor, log)

    def _take_log(self, actor: str, log: list[str] | None) -> None:
        if actor == self._actor:
            self._log = log
            self.draw()

    def draw(self) -> None:
        """Draw the newest document."""
        self._top.show([[(self._actor, "bold"), ("   esc back   n p another actor   ↑ ↓ scroll", "dim")]])
        document = self._document()
        if document is not None and self._past and document.wall != self._log_until:
            self._log_until = document.wall
            self._read_log()
        if document is not None and self._view.size.width:
            self._view.show(detail(document, self._actor, self._log, self._view.room, self._glyphs))

    def action_other(self, by: int) -> None:
        """Show the next actor, or the one before."""
        document = self._document()
        names = [actor.name for actor in document.actors] if document is not None else []
        if self._actor in names:
            self._actor, self._log = names[(names.index(self._actor) + by) % len(names)], None
            self._view.scroll_home(animate=False)
            self.draw()
            self._read_log()

    def on_pane_view_resized(self, event: PaneView.Resized) -> None:
        """Draw for the new width."""
        event.stop()
        self.call_after_refresh(self.draw)

"""The panes side by side, or one of them where there is room for no more. Their lines are made by panes/."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.layout import Room, heights
from asyncrl.monitor.top.panes import PANES, pane, title
from asyncrl.monitor.top.panes.base import Choice, PaneName
from asyncrl.monitor.top.text import Glyphs
from asyncrl.monitor.top.widgets import PaneView


class Body(Horizontal):
    """The container of the panes."""

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__(id="body")
        self.panes = {name: PaneView(ascii_only=ascii_only, id=name, classes="pane") for name in PANES}
        self._left, self._right, self._pair = Vertical(id="left"), Vertical(id="right"), Horizontal(id="pair")

    def compose(self) -> ComposeResult:
        panes = self.panes
        with self._left:
            yield panes["rollouters"]
            yield panes["episodes"]
            yield panes["events"]
        with self._right:
            yield panes["learner"]
            yield panes["weights"]
            yield panes["staleness"]
            with self._pair:
                yield panes["reward"]
                yield panes["ledger"]

    def see(self, seen: PaneName) -> None:
        """Show the pane ``seen``, where one alone is shown."""
        for name, view in self.panes.items():
            view.set_class(name == seen, "seen")
        left = seen in ("rollouters", "episodes", "events")
        self._left.set_class(left, "seen")
        self._right.set_class(not left, "seen")
        self._pair.set_class(seen in ("reward", "ledger"), "seen")

    def show(self, document: Document, choice: Choice, glyphs: Glyphs, room: Room, rows: int) -> None:
        """Draw the document, on a terminal of so many ``rows``."""
        self.panes["episodes"].set_class(document.episodes is None, "absent")
        for known, height in heights(document, room, rows).items():
            self.panes[known].styles.height = height
        for number, (name, view) in enumerate(self.panes.items(), 1):
            if view.display and view.size.width:
                view.show(pane(name, document, choice, view.room, glyphs))
                said = f"{number} {title(name, document, choice)}"
                # Setting it draws the whole pane anew, whatever it was.
                if view.border_title != said:
                    view.border_title = said

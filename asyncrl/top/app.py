"""The terminal of asyncrl-top: panes around the pipeline, live or from a recording. Read-only.

It adds each new snapshot to a history. Ticks draw a SnapshotView of the history at most every DRAW_S. If the feed
fails, the foot says so, and the last view stays. If it fails before any snapshot is known, the application ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Key
from textual.theme import Theme
from textual.widgets import DataTable, Input, Static

from asyncrl.core.errors import AsyncRLError
from asyncrl.core.formatting import printable
from asyncrl.top.actor_panes import sorted_next
from asyncrl.top.client import Away
from asyncrl.top.detail import DetailScreen, HelpScreen
from asyncrl.top.draw import LEVELS, Choice, Pane, PaneName, Row, Table, text
from asyncrl.top.panes import PANES, panes_of, title
from asyncrl.top.pipeline import foot, header, pipeline, status, tabs, time_bar
from asyncrl.top.replay import Feed, SnapshotSource
from asyncrl.top.samples_screen import SamplesScreen
from asyncrl.top.view import SnapshotView

DRAW_S = 0.8
TICK_S = 0.25
"""About the shortest time between two draws by ticks, and the time between two ticks (``Top._tick``)."""
NOTE_S = 8.0
"""Seconds for which a note is shown."""
WRITING_S = 60.0
"""Seconds for which the start of a trace is shown; its outcome comes earlier."""

COLOURS = Theme(
    "asyncrl", primary="#7aa2c4", foreground="#d5dae5", background="#1c2029", surface="#3d475c", panel="#252b37"
)
TOO_SMALL = """\
needs 60×16, better 80×24. Make this terminal larger, or
print everything once: asyncrl-top RUN --once
q quits; the run continues"""


class Lines(VerticalScroll):
    """Lines that scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
    ]

    def __init__(self) -> None:
        self._content = Static()
        super().__init__(self._content, classes="lines")

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


class Top(App[int]):
    """The application of the terminal; see the module."""

    CSS_PATH = "app.tcss"
    TITLE = "asyncrl-top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"pane({number})", "" if number > 1 else "panes", key_display="1 … 8", show=False)
            for number in range(1, len(PANES) + 1)
        ),
        Binding("tab", "next(1)", "panes", show=False, priority=True),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        Binding("s", "sort", "sort by the next column", show=False),
        Binding("r", "reverse", "reverse the order", show=False),
        # With priority: the next keys belong to the filter.
        Binding("slash", "filter", "filter", show=False, priority=True),
        Binding("escape", "unfilter", "show all", show=False),
        Binding("l", "level", "level of events", show=False),
        Binding("c", "samples", "samples, as text", show=False),
        Binding("t", "trace", "write a trace", show=False),
        Binding("space", "freeze", "freeze; play, stop", show=False),
        # With priority: tables use the arrows too.
        Binding("left", "go('step', -1)", "one snapshot", show=False, priority=True),
        Binding("right", "go('step', 1)", "one snapshot", show=False, priority=True),
        Binding("less_than_sign,comma", "go('seek', -0.05)", "a twentieth of it", key_display="<", show=False),
        Binding("greater_than_sign,full_stop", "go('seek', 0.05)", "a twentieth of it", key_display=">", show=False),
        Binding("minus", "go('faster', -1)", "slower, faster", show=False),
        Binding("plus,equals_sign", "go('faster', 1)", "slower, faster", key_display="+", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("q,ctrl+q", "quit", "quit only asyncrl-top", show=False),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, source: SnapshotSource) -> None:
        # With NO_COLOR Textual would draw greys.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (150, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-short"), (40, "-high")]
        self.register_theme(COLOURS)
        self.theme = COLOURS.name
        self.source = source
        self.view: SnapshotView | None = None
        self.failure: AsyncRLError | None = None
        """Error of the feed if it failed before any snapshot was known; the command prints it."""
        self._history = source.history
        self._choice = Choice()
        self._frozen = False
        self._away: Away | None = None
        """Reason that no snapshot comes now; None while snapshots come."""
        self._over = ""
        """Reason that no more snapshots come; empty while they may."""
        self._drawn_at = 0.0
        self._stale = False
        """Whether a newer snapshot is not drawn yet."""
        self._chosen_pane: PaneName = "rollouters"
        self._header, self._pipeline, self._time, self._tab_line, self._foot = (
            Static(id=name) for name in ("header", "pipeline", "time", "tabs", "foot")
        )
        self.panes = {name: PaneView(name, self._show_actor) for name in PANES}
        self._filter = Input(id="filter", placeholder="filter: part of a name, host, state or text")

    # --- the screen ---

    def compose(self) -> ComposeResult:
        panes = self.panes
        yield from (self._header, self._pipeline, self._time, self._tab_line)
        with Horizontal(id="body"):
            yield Vertical(panes["rollouters"], panes["episodes"], panes["events"], id="left")
            pair = Horizontal(panes["reward"], panes["ledger"], id="pair")
            yield Vertical(panes["learner"], panes["weights"], panes["staleness"], pair, id="right")
        yield from (self._filter, self._foot, Static(TOO_SMALL, id="small"))

    def on_mount(self) -> None:
        self.screen.set_classes("first replay" if self.source.replay is not None else "first")
        self._seen()
        self.set_interval(TICK_S, self._tick)
        if self.source.feed is not None:
            self._follow(self.source.feed)
        self._draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _seen(self) -> None:
        """Show the chosen pane, if the terminal has room for one pane only, and let keys go to it."""
        base, chosen = self.screen_stack[0], self.panes[self._chosen_pane]
        for each in base.query("#body *"):
            each.set_class(each is chosen or each in chosen.ancestors, "seen")
        if self.screen is base:
            chosen.focus_entries()
        self.call_after_refresh(self._draw)

    # --- snapshots ---

    @work(exclusive=True)
    async def _follow(self, feed: Feed) -> None:
        """Add each snapshot of the feed to the history; note why the feed has ended. Exit if it fails before any."""
        try:
            async for seen in feed():
                if isinstance(seen, Away):
                    self._away = seen
                else:
                    self._away = None
                    self._history.add(seen)
                    # A tick draws it later, because only an open request gets the run's last snapshot: the feed must
                    # send its next request first.
                    self._stale = True
            self._over = "the run has ended"
        except AsyncRLError as error:
            if self.view is None and self._history.newest is None:
                self.failure = error
                self.exit(return_code=1)
            self._over = str(error)
        self._stale = True
        self._tick()

    def _tick(self) -> None:
        """Advance the replay. Draw everything if there is something new and DRAW_S have passed, else the foot alone.

        While the view is frozen only the foot is drawn.
        """
        replay = self.source.replay
        if replay is not None:
            earlier_position = replay.position
            replay.advance(TICK_S)
            self._stale |= replay.position != earlier_position
        now = time.monotonic()
        # Half a tick less, so that the tick nearest to DRAW_S draws.
        if self._stale and not self._frozen and now - self._drawn_at >= DRAW_S - TICK_S / 2:
            self._drawn_at, self._stale = now, False
            self._draw()
        else:
            self._draw_foot()

    # --- drawing ---

    def _draw(self) -> None:
        """Draw everything that is visible, of the newest snapshot unless the view is frozen."""
        if self.source.replay is not None:
            self._history = self.source.replay.history()
        if not self._frozen and self._history.newest is not None:
            self.view = SnapshotView(self._history)
        self._draw_foot()
        if self.view is None:
            self._header.update(Group(text("asyncrl-top", "dim"), text("waiting for the run", "dim")))
            return
        shown, choice, wide = self.view, self._choice, self._header.size.width
        # Before the first layout nothing has a size.
        if not wide:
            return
        self._header.update(header(shown))
        self._pipeline.update(pipeline(shown, wide))
        self._tab_line.update(Group(tabs(panes_of(shown), self._chosen_pane, wide)))
        if self.source.replay is not None:
            self._time.update(time_bar(self.source.replay))
        self.panes["episodes"].set_class(not shown.of("episodes"), "absent")
        for number, (name, widget) in enumerate(self.panes.items(), 1):
            if widget.is_on_screen and widget.size.width > 1:
                widget.show(PANES[name](shown, choice))
                widget.border_title = f"{number} {title(name, shown, choice)}"
        if self.focused is None and self.screen is self.screen_stack[0]:
            self.panes[self._chosen_pane].focus_entries()
        if isinstance(self.screen, DetailScreen):
            self.screen.draw()

    def _draw_foot(self) -> None:
        replay, attached = self.source.replay, self.view is not None
        now = status(self._over, self._away, replay, frozen=self._frozen, attached=attached)
        self._foot.update(foot(now, self._choice))

    # --- keys ---

    def action_interrupt(self) -> None:
        self.exit(return_code=130)

    def action_pane(self, number: int) -> None:
        """Show or focus a pane, if this run has it."""
        panes = panes_of(self.view)
        if number <= len(panes):
            self._chosen_pane = panes[number - 1]
            self._seen()

    def action_next(self, by: int) -> None:
        panes = panes_of(self.view)
        at = panes.index(self._chosen_pane) if self._chosen_pane in panes else 0
        self.action_pane((at + by) % len(panes) + 1)

    def action_sort(self) -> None:
        """Sort by the next column, numbers from the largest on."""
        self._choose(sorted_next(self._choice))

    def action_reverse(self) -> None:
        self._choose(replace(self._choice, descending=not self._choice.descending))

    def action_level(self) -> None:
        level = LEVELS[(LEVELS.index(self._choice.level) + 1) % len(LEVELS)]
        self._choose(replace(self._choice, level=level))

    def action_filter(self) -> None:
        if self.focused is self._filter:
            # Posted and not inserted, so that the slash comes after the typed keys that are still queued.
            self._filter.post_message(Key("slash", "/"))
        elif self.screen is self.screen_stack[0]:
            self._filter.display = True
            self.screen.set_focus(self._filter)

    def action_unfilter(self) -> None:
        self._filter.value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._choose(replace(self._choice, needle=event.value))

    def on_input_submitted(self) -> None:
        self._filter.display = False
        self.panes[self._chosen_pane].focus_entries()

    def _choose(self, choice: Choice) -> None:
        self._choice = choice
        self._draw()

    def action_freeze(self) -> None:
        """Freeze or continue; in a replay play or stop."""
        replay = self.source.replay
        if replay is None:
            self._frozen = not self._frozen
        else:
            replay.play_or_stop()
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the app takes a key: moves belong to a replay, and arrows to an open filter."""
        return action != "go" or (self.source.replay is not None and self.focused is not self._filter)

    def action_go(self, how: Literal["step", "seek", "faster"], by: Any) -> None:
        """Move in a replay, or change its speed."""
        if self.source.replay is not None:
            getattr(self.source.replay, how)(by)
            self._draw()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen.active_bindings.values()))

    def action_samples(self) -> None:
        """Show the groups of RUN/samples; in a replay up to its step."""
        if self.screen is self.screen_stack[0]:
            self.push_screen(SamplesScreen(self.source.run_dir, until=self._last_step))

    def _last_step(self) -> int | None:
        """The step that a replay shows, up to which it shows groups; None in a live run: all groups."""
        return self.view.run.step if self.source.replay is not None and self.view is not None else None

    def _show_actor(self, name: str) -> None:
        past = self.source.replay is not None
        self.push_screen(DetailScreen(name, lambda: self.view, self.source.run_dir, past=past))

    @work(exclusive=True, group="trace")
    async def action_trace(self) -> None:
        if self.source.trace is None:
            self._say("a trace needs a live run")
            return
        self._say("the trace is being written", WRITING_S)
        try:
            self._say(await self.source.trace())
        except AsyncRLError as error:
            self._say(f"no trace: {error}")

    def _say(self, note: str, seconds: float = NOTE_S) -> None:
        """Show a note for a while, instead of the previous one."""
        self.clear_notifications()
        self.notify(printable(note), timeout=seconds, markup=False)

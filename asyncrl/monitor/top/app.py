"""The terminal of asyncrl-top: panes around the pipeline, live or from a recording. Read-only.

It keeps a history of snapshots, builds a Document of it and draws that; nothing here decides anything about a run. Each
new snapshot is drawn at most every DRAW_S. A feed that fails is shown as such, and what was last seen stays.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import Input

from asyncrl.errors import AsyncRLError
from asyncrl.monitor.client import Away
from asyncrl.monitor.top.build import build
from asyncrl.monitor.top.detail import detail
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.history import History
from asyncrl.monitor.top.log_tail import last_lines
from asyncrl.monitor.top.panes import LEVELS, PANES, SORTS, Choice, Pane, PaneName, pane, title
from asyncrl.monitor.top.pipeline import header, pipeline
from asyncrl.monitor.top.replay import Replay
from asyncrl.monitor.top.text import ASCII, UNICODE, Line, duration, level_bar
from asyncrl.monitor.top.widgets import Block, PaneView
from asyncrl.snapshot import Snapshot

DRAW_S = 0.75
TICK_S = 0.25
WIDE = (150, 40)
"""From this width and height on all panes are seen at once."""

HELP = """\
 who waits on whom
   The stage marked with a diamond sets the pace; the line below the
   pipeline says why. Bars split all time by what it was spent on:
   {work} work   {weights} weights   {upkeep} checkpoints   {start} starting   {wait} waiting

 1 … 7, tab     panes                  s   sort by the next column
 ↑ ↓ enter      an actor in detail     r   the other way round
 space          freeze, go on          /   filter, esc shows all again
 l              level of events        t   have a trace written
 ?              this                   q   quit; the run does not notice

 in a replay
 ← →            one snapshot           < >  a twentieth of it
 space          play, stop             - +  slower, faster

 flight: trajectories in a rollouter   wait: of these not in the engine
 v, lag: weights served, and how many versions behind
 rst: restarts of process and engine   oldest: age of a trajectory"""


Feed = Callable[[], AsyncIterator[Snapshot | Away]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where snapshots come from: a feed, or a recording."""

    feed: Feed | None = None
    replay: Replay | None = None
    history: History = field(default_factory=History)
    """What is known before the first snapshot comes."""
    run_dir: Path | None = None
    """Where logs are, if they can be read."""
    trace: Callable[[], Awaitable[str]] | None = None
    """Has a trace written; says what came of it."""


class Top(App[int]):
    """See the module."""

    CSS = """
    Screen { background: #1c2029; color: #d5dae5; }
    #header { height: 2; background: #252b37; padding: 0 1; }
    #pipeline { height: 8; padding: 1 1 0 1; }
    #time { height: 1; padding: 0 1; display: none; }
    #tabs { height: 1; padding: 0 1; background: #252b37; }
    #foot { height: 1; padding: 0 1; background: #252b37; }
    #filter { height: 1; border: none; padding: 0 1; display: none; background: #313a4b; }
    #body { height: 1fr; }
    PaneView { padding: 0 1; background: #1c2029; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
        scrollbar-color: #3d475c; scrollbar-background: #1c2029; overflow-x: hidden; }
    .narrow #left, .narrow #right, .narrow #pair, .narrow .pane { display: none; height: 1fr; width: 1fr; }
    .narrow #left.seen, .narrow #right.seen, .narrow #pair.seen, .narrow .pane.seen { display: block; }
    .wide #tabs { display: none; }
    .wide #left { width: 1fr; }
    .wide #right { width: 96; }
    .wide .pane { border: round #3d475c; border-title-color: #aab3c5; }
    .wide .pane:focus { border: round #7aa2c4; border-title-color: #ffffff; }
    .wide #rollouters { height: 2fr; }
    .wide #events { height: 1fr; }
    .wide #learner { height: 8; }
    .wide #weights { height: 1fr; }
    .wide #staleness { height: 11; }
    .wide #pair { height: 10; }
    .wide #reward, .wide #ledger { width: 1fr; height: 1fr; }
    """
    TITLE = "asyncrl-top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("question_mark,h", "help", show=False),
        Binding("s", "sort", show=False),
        Binding("r", "reverse", show=False),
        Binding("slash", "filter", show=False),
        Binding("escape", "unfilter", show=False),
        Binding("space", "freeze", show=False),
        Binding("l", "level", show=False),
        Binding("t", "trace", show=False),
        Binding("tab", "next(1)", show=False, priority=True),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        *(Binding(str(number), f"pane({number})", show=False) for number in range(1, len(PANES) + 1)),
        Binding("left", "step(-1)", show=False),
        Binding("right", "step(1)", show=False),
        Binding("less_than_sign,comma", "seek(-0.05)", show=False),
        Binding("greater_than_sign,full_stop", "seek(0.05)", show=False),
        Binding("plus,equals_sign", "speed(1)", show=False),
        Binding("minus", "speed(-1)", show=False),
    ]

    def __init__(self, source: Source, *, ascii_only: bool = False) -> None:
        super().__init__()
        self.source = source
        self.document: Document | None = None
        self.ascii_only = ascii_only
        self.glyphs = ASCII if ascii_only else UNICODE
        self._history = source.history
        self._choice = Choice()
        self._frozen = False
        self._away: Away | None = None
        self._over = ""
        """Why nothing more comes."""
        self._note = ""
        self._drawn_at = 0.0
        self._stale = False
        """There is something that is not drawn."""
        self._seen: PaneName = "rollouters"
        self._header, self._pipeline, self._time, self._tab_line, self._foot = (
            Block(ascii_only=ascii_only, id=name) for name in ("header", "pipeline", "time", "tabs", "foot")
        )
        self._panes = {name: PaneView(ascii_only=ascii_only, id=name, classes="pane") for name in PANES}
        self._filter = Input(id="filter", placeholder="filter: part of a name, host, state or text")

    # --- the screen ---

    def compose(self) -> ComposeResult:
        """See App."""

        panes = self._panes
        yield self._header
        yield self._pipeline
        yield self._time
        yield self._tab_line
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield panes["rollouters"]
                yield panes["events"]
            with Vertical(id="right"):
                yield panes["learner"]
                yield panes["weights"]
                yield panes["staleness"]
                with Horizontal(id="pair"):
                    yield panes["reward"]
                    yield panes["ledger"]
        yield self._filter
        yield self._foot

    def on_mount(self) -> None:
        """Begin."""
        self._time.display = self.source.replay is not None
        self._arrange()
        self.set_interval(TICK_S, self._tick)
        if self.source.feed is not None:
            self._follow(self.source.feed)
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """See the stylesheet."""
        self._arrange()

    def _arrange(self) -> None:
        """All panes at once, or one of them."""
        wide = self.size.width >= WIDE[0] and self.size.height >= WIDE[1]
        base = self.screen_stack[0]
        base.set_class(wide, "wide")
        base.set_class(not wide, "narrow")
        for name in PANES:
            self._panes[name].set_class(name == self._seen, "seen")
        base.query_one("#left").set_class(self._seen in ("rollouters", "events"), "seen")
        base.query_one("#right").set_class(self._seen not in ("rollouters", "events"), "seen")
        base.query_one("#pair").set_class(self._seen in ("reward", "ledger"), "seen")
        if self.screen is base:
            self._panes[self._seen].focus()
        self.call_after_refresh(self._draw)

    # --- what comes in ---

    @work(exclusive=True)
    async def _follow(self, feed: Feed) -> None:
        try:
            async for seen in feed():
                if isinstance(seen, Away):
                    self._away = seen
                else:
                    self._away = None
                    self._history.add(seen)
                    self._stale = True
                    self._tick()
            self._over = "the run has ended"
        except AsyncRLError as error:
            self._over = str(error)
        self._stale = True
        self._tick()

    def _tick(self) -> None:
        replay = self.source.replay
        if replay is not None:
            before = replay.position
            replay.advance(TICK_S)
            self._stale |= replay.position != before
        now = time.monotonic()
        if self._stale and not self._frozen and now - self._drawn_at >= DRAW_S - TICK_S / 2:
            self._drawn_at, self._stale = now, False
            self._draw()
        else:
            self._draw_foot()

    # --- drawing ---

    def _draw(self) -> None:
        """Draw what is known."""
        if self.source.replay is not None:
            self._history = self.source.replay.history()
        if not self._frozen and self._history.newest is not None:
            self.document = build(self._history)
        self._draw_foot()
        if self.document is None:
            self._header.show([[("asyncrl-top", "bold")], [("waiting for the run", "dim")]])
            return
        document, glyphs = self.document, self.glyphs
        wide = self._header.size.width
        if not wide:
            return
        self._header.show(header(document, wide, glyphs))
        self._pipeline.show(pipeline(document, wide, glyphs))
        self._tab_line.show([self._tabs(document)])
        if self.source.replay is not None:
            self._time.show([self._time_bar(self.source.replay, wide)])
        for name in PANES:
            view = self._panes[name]
            if view.display and view.size.width:
                view.show(pane(name, document, self._choice, view.room, glyphs))
                view.border_title = f"{PANES.index(name) + 1} {title(name, document, self._choice)}"
        if self.screen_stack and isinstance(self.screen, DetailScreen):
            self.screen.draw()

    def _tabs(self, document: Document) -> Line:
        line: Line = []
        for number, name in enumerate(PANES):
            text = f"{number + 1} {name}"
            line += [(text, "mark" if name == self._seen else "dim"), ("  ", "")]
        return line

    def _time_bar(self, replay: Replay, width: int) -> Line:
        past, whole = replay.position - replay.begin, replay.end - replay.begin
        left = f"{time.strftime('%H:%M:%S', time.localtime(replay.position))}  {duration(past)} of {duration(whole)}  "
        right = f"  ×{replay.speed:g} {'playing' if replay.playing else 'paused'}"
        bar = level_bar(past, whole, max(4, width - len(left) - len(right)), self.glyphs)
        return [(left, ""), *bar, (right, "dim")]

    def _draw_foot(self) -> None:
        status: Line
        if self._note:
            status = [(self._note, "warn")]
        elif self._frozen:
            status = [("frozen, space goes on", "warn")]
        elif self.source.replay is not None:
            status = [("replay", "level")]
        elif self._over:
            status = [(self._over, "warn")]
        elif self._away is not None:
            status = [(f"no answer for {duration(self._away.seconds)}", "bad")]
        elif self.document is None:
            status = [("attaching", "start")]
        else:
            status = [("live", "good")]
        chosen: list[str] = []
        if self._choice.needle:
            chosen.append(f"filter: {self._choice.needle}")
        if self._choice.level != LEVELS[0]:
            chosen.append(f"events: {self._choice.level}")
        if chosen:
            status += [(f"   {'   '.join(chosen)}", "warn")]
        keys = "? help  q quit  s sort  / filter  space freeze"
        room = self._foot.size.width - 2 - sum(len(text) for text, _ in status)
        self._foot.show([[*status, (f"{keys:>{room}}" if room >= len(keys) else "", "dim")]])

    # --- keys ---

    def action_pane(self, number: int) -> None:
        """Show or focus a pane."""
        self._seen = PANES[number - 1]
        self._arrange()

    def action_next(self, by: int) -> None:
        """The next pane."""
        self.action_pane((PANES.index(self._seen) + by) % len(PANES) + 1)

    def action_sort(self) -> None:
        """Sort by the next column, the largest first where that is what one looks for."""
        sort = SORTS[(SORTS.index(self._choice.sort) + 1) % len(SORTS)]
        descending = sort not in ("name", "host", "state", "version", "tokens_per_s")
        self._choose(replace(self._choice, sort=sort, descending=descending))

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._choose(replace(self._choice, descending=not self._choice.descending))

    def action_level(self) -> None:
        """The next level of events."""
        level = LEVELS[(LEVELS.index(self._choice.level) + 1) % len(LEVELS)]
        self._choose(replace(self._choice, level=level))

    def action_filter(self) -> None:
        """Ask for what to filter by."""
        self._filter.display = True
        self._filter.focus()

    def action_unfilter(self) -> None:
        """Show everything."""
        self._filter.value = ""
        self._end_filter("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._choose(replace(self._choice, needle=event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._end_filter(event.value)

    def _end_filter(self, needle: str) -> None:
        self._filter.display = False
        self._panes[self._seen].focus()
        self._choose(replace(self._choice, needle=needle))

    def _choose(self, choice: Choice) -> None:
        self._choice = choice
        self._draw()

    def action_freeze(self) -> None:
        """Stop drawing, or go on; in a replay play or stop."""
        replay = self.source.replay
        if replay is None:
            self._frozen = not self._frozen
        elif replay.at_end and not replay.playing:
            replay.jump(replay.begin)
            replay.playing = True
        else:
            replay.playing = not replay.playing
        self._draw()

    def action_step(self, by: int) -> None:
        """By a snapshot."""
        if self.source.replay is not None:
            self.source.replay.step(by)
            self._draw()

    def action_seek(self, share: float) -> None:
        """By a share of the recording."""
        if (replay := self.source.replay) is not None:
            replay.jump(replay.position + share * (replay.end - replay.begin))
            self._draw()

    def action_speed(self, by: int) -> None:
        """Play faster or slower."""
        if self.source.replay is not None:
            self.source.replay.faster(by)
            self._draw()

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def on_pane_view_chosen(self, event: PaneView.Chosen) -> None:
        """Show an actor."""
        self.push_screen(DetailScreen(event.key))

    def on_pane_view_resized(self, event: PaneView.Resized) -> None:
        """Draw for the new width."""
        self.call_after_refresh(self._draw)

    @work(exclusive=True, group="trace")
    async def action_trace(self) -> None:
        """Have a trace written."""
        if self.source.trace is None:
            self._note = "a trace needs a living run"
        else:
            self._note = "the trace is being written"
            self._draw_foot()
            try:
                self._note = await self.source.trace()
            except AsyncRLError as error:
                self._note = f"no trace: {error}"
        self._draw_foot()
        self.set_timer(8.0, self._forget_note)

    def _forget_note(self) -> None:
        self._note = ""
        self._draw_foot()


class HelpScreen(ModalScreen[None]):
    """The keys."""

    CSS = """
    HelpScreen { align: center middle; }
    #help { width: 76; height: 22; max-height: 100%; border: round #7aa2c4; background: #252b37; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,h,enter,space", "app.pop_screen", show=False)
    ]

    def compose(self) -> ComposeResult:
        """See Screen."""
        app = self.app
        assert isinstance(app, Top)
        yield Block(ascii_only=app.ascii_only, id="help")

    def on_mount(self) -> None:
        """Draw."""
        app = self.app
        assert isinstance(app, Top)
        lines = HELP.format_map(dict(app.glyphs.kinds.items())).splitlines()
        self.query_one("#help", Block).show([[(line, "")] for line in lines])


class DetailScreen(Screen[None]):
    """An actor, as long as it is looked at."""

    CSS = """
    #name { height: 1; background: #252b37; padding: 0 1; }
    #detail { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "app.pop_screen", show=False)]

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor
        self._log: list[str] | None = None

    def compose(self) -> ComposeResult:
        """See Screen."""
        app = self.app
        assert isinstance(app, Top)
        yield Block(ascii_only=app.ascii_only, id="name")
        yield PaneView(ascii_only=app.ascii_only, id="detail")

    def on_mount(self) -> None:
        """Draw, and read the log from time to time."""
        self._read_log()
        self.set_interval(2.0, self._read_log)
        self.call_after_refresh(self.draw)

    @work(thread=True, exclusive=True)
    def _read_log(self) -> None:
        app = self.app
        assert isinstance(app, Top)
        document, run_dir = app.document, app.source.run_dir
        if document is not None and run_dir is not None:
            self._log = last_lines(run_dir, document.run.attempt, self._actor)
            app.call_from_thread(self.draw)

    def draw(self) -> None:
        """Draw the newest document."""
        app = self.app
        assert isinstance(app, Top)
        view = self.query_one("#detail", PaneView)
        self.query_one("#name", Block).show([[(self._actor, "bold"), ("   esc back   ↑ ↓ scroll", "dim")]])
        if app.document is None or not view.size.width:
            return
        drawn: Pane = detail(app.document, self._actor, self._log, view.room, app.glyphs)
        view.show(drawn)

    def on_pane_view_resized(self, event: PaneView.Resized) -> None:
        """Draw for the new width."""
        event.stop()
        self.call_after_refresh(self.draw)

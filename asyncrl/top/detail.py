"""Screens above the panes: of one actor, with the end of its log, and of the keys. PageScreen is the base of each."""

from __future__ import annotations

import contextlib
import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import BinaryIO, ClassVar

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as Grid
from textual import work
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from asyncrl.core.files import from_json
from asyncrl.core.formatting import ABSENT, count, duration, fixed, percent, size
from asyncrl.messages.monitor import ActorView, Interval
from asyncrl.rpc.lifecycle.roster import CONTROLLER
from asyncrl.top.bottleneck import by_kind, kind_of
from asyncrl.top.draw import (
    BARS,
    PROBLEMS,
    grid_of,
    in_columns,
    joined,
    labelled,
    state_bar,
    text,
    warn_style,
)
from asyncrl.top.panes import LEVEL_STYLES, LONGEST_EVENT
from asyncrl.top.view import SnapshotView, is_gone

LOG_S = 2.0
"""Time between two reads of the end of a log (s)."""
LOG_LINES = 20
LOG_BYTES = 16_384
PROBE = 1 << 18
"""Bytes, at most, that are looked through for a line with a timestamp."""
EVENTS_SHOWN = 20
BAR = 24
"""Cells of the bar of a resource's time."""


def detail(view: SnapshotView, name: str, log: Sequence[str] | None) -> Group:
    """The page of an actor. ``log`` are the last lines of its log file, oldest first; None if it cannot be read."""
    actor = next((each for each in view.snapshot.actors if each.name == name), None)
    if actor is None:
        return Group(text(f"{name} is not part of this run", "bad"))
    waits = [
        text(f"{duration(wait.seconds):>8}  {wait.whom}  {wait.what}{'  (idle)' if wait.idle else ''}")
        for wait in actor.waits
    ]
    events = [
        _entry(time.strftime("%H:%M:%S", time.localtime(event.wall)), event.level, event.text)
        for event in view.snapshot.events
        if (event.actor or CONTROLLER) == name
    ]
    metrics = {metric: text(_number(metric, value)) for metric, value in sorted(actor.metrics.items())}
    sections: dict[str, Sequence[RenderableType]] = {
        "OPEN WAITS, the oldest first": waits or [text("none", "dim")],
        "LOG, its last lines": [] if log is None else [*map(_log_line, log)] or [text("none up to here", "dim")],
        "EVENTS, the newest first": events[: -EVENTS_SHOWN - 1 : -1] or [text("none", "dim")],
        "TIME, since its start": [_times(Interval(None, view.snapshot), actor)] if actor.resources else [],
        "METRICS": [in_columns(metrics)] if metrics else [],
    }
    titled = ([text(""), text(title, "bold"), *parts] for title, parts in sections.items() if parts)
    return Group(*_facts(actor), *chain.from_iterable(titled))


def _facts(actor: ActorView) -> list[RenderableType]:
    """Lines on an actor: its condition, its host and process, their use, and a line for each GPU."""
    # Without a heartbeat all facts are unknown. Once the actor is gone, its use of the host is unknown.
    has_state, is_known = bool(actor.state), actor.condition != "absent"
    is_present = has_state and not is_gone(actor)
    busy, late = (actor.loop_busy, actor.loop_lag_s) if is_present else (None, None)
    return [
        joined(
            labelled("condition", actor.condition, "bad" if actor.condition in PROBLEMS else ""),
            labelled("state", f"{actor.state} {actor.awaiting}".strip() or ABSENT),
            labelled("for", duration(actor.state_s if has_state else None)),
            labelled("heard", f"{duration(actor.heard_s)} ago" if is_known else ABSENT, warn_style(actor.heard_s > 10)),
        ),
        joined(
            labelled("host", actor.host or ABSENT),
            labelled("pid", str(actor.pid or ABSENT)),
            labelled("restarts", str(actor.restarts) if is_known else ABSENT, warn_style(actor.restarts)),
            labelled("version", str(actor.version) if actor.version >= 0 else ABSENT),
        ),
        joined(
            labelled("processors", fixed(actor.cpu if is_present else None)),
            labelled("memory", size(actor.rss_bytes or None if is_present else None)),
            labelled("event loop busy", percent(busy), warn_style((busy or 0.0) > 0.8)),
            labelled("loop lag", duration(late), warn_style((late or 0.0) > 0.5)),
        ),
        *(
            labelled(
                f"GPU {gpu.index}",
                f"{percent(gpu.utilisation)}  {size(gpu.memory_bytes)} of {size(gpu.memory_total_bytes)}",
            )
            for gpu in actor.gpus
        ),
    ]


def _times(since_start: Interval, actor: ActorView) -> Grid:
    """A bar for each resource, and the shares of its states."""
    rows: list[list[RenderableType]] = []
    for resource in actor.resources:
        shares = since_start.shares([(actor, resource)])
        states = [
            text(f"{state} {percent(share)}", "dim" if kind_of(state) == "wait" else "")
            for state, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        ]
        bar = state_bar(by_kind(shares), BAR)
        rows.append([text(resource.name, "dim"), bar, Columns(states, padding=(0, 2))])
    return grid_of(rows, Column(width=10), Column(width=BAR), Column())


def _number(name: str, value: float) -> str:
    """The value of a metric as text, in the unit in which its name ends."""
    if name.endswith("_s"):
        return duration(value)
    if name.endswith("_bytes") or name.endswith("/bytes"):
        return size(value)
    return count(value) if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def _log_line(line: str) -> RenderableType:
    """A line of a log: JSON as the actors write it, or other text that was printed."""
    try:
        entry = from_json(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return text(line, wraps=True)
    level, at, event = (str(entry.pop(key, "")) for key in ("level", "timestamp", "event"))
    entry.pop("actor", None)
    return _entry(at[11:19], level, f"{event} {' '.join(f'{key}={value}' for key, value in entry.items())}")


def _entry(at: str, level: str, words: str) -> Grid:
    """A text after its time and level."""
    shown = text(" ".join(words.split()), LEVEL_STYLES.get(level, ""), wraps=True)
    shown.truncate(LONGEST_EVENT, overflow="ellipsis")
    return grid_of([[text(at, "dim"), text(level, "dim"), shown]], Column(width=8), Column(width=8), Column())


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
        Binding("j", "scroll_page(1)", show=False),
        Binding("k", "scroll_page(-1)", show=False),
    ]

    keys: ClassVar[str]
    """Hints of the keys, after the title."""

    def __init__(self) -> None:
        super().__init__()
        self._head, self._content = Static(id="name"), Static()
        self._page = VerticalScroll(self._content, id="page", classes="lines")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._page

    def show_title(self, title: str) -> None:
        self._head.update(joined(text(title, "bold"), text(self.keys, "dim")))

    def show_page(self, *content: RenderableType) -> None:
        self._content.update(Group(*content))

    def action_scroll_page(self, by: int) -> None:
        self._page.scroll_relative(y=by)


class DetailScreen(PageScreen):
    """One actor in detail."""

    keys = "esc back   n p another actor   ↑ ↓ scroll"

    def __init__(
        self, actor: str, view: Callable[[], SnapshotView | None], run_dir: Path | None, *, past: bool
    ) -> None:
        """``past``: the view shows an earlier moment, as in a replay, and the log ends at that moment."""
        super().__init__()
        self._actor, self._view, self._run_dir = actor, view, run_dir
        self._past = past
        self._log: Sequence[str] | None = None
        """Last lines of the log; None if they are not read yet or cannot be read."""
        self._log_until = math.inf
        """Unix time (s) at which the log that is read ends."""

    def on_mount(self) -> None:
        """Read the log from time to time."""
        self.draw()
        self._read_log()
        self.set_interval(LOG_S, self._read_log)

    @work(thread=True, exclusive=True)
    def _read_log(self) -> None:
        view, actor = self._view(), self._actor
        if view is not None and self._run_dir is not None:
            self._log_until = view.snapshot.wall if self._past else math.inf
            log = last_lines(self._run_dir, view.run.attempt, actor, self._log_until)
            self.app.call_from_thread(self._take_log, actor, log)

    def _take_log(self, actor: str, log: list[str] | None) -> None:
        # The thread may have read the log of the actor that was shown before.
        if actor == self._actor:
            self._log = log
            self.draw()

    def draw(self) -> None:
        self.show_title(self._actor)
        view = self._view()
        if view is not None and self._past and view.snapshot.wall != self._log_until:
            self._log_until = view.snapshot.wall
            self._read_log()
        if view is not None:
            self.show_page(detail(view, self._actor, self._log))

    def action_other(self, by: int) -> None:
        view = self._view()
        names = [actor.name for actor in view.snapshot.actors] if view is not None else []
        if self._actor in names:
            self._actor, self._log = names[(names.index(self._actor) + by) % len(names)], None
            self._page.scroll_home(animate=False)
            self.draw()
            self._read_log()


# --- the end of a log ---
# Lines come in order of time, each with a timestamp in ISO 8601. A line that was printed without one belongs to the
# line before. A log of any length is read in a few small parts.


def last_lines(run_dir: Path, attempt: int, actor: str, until: float = math.inf) -> list[str] | None:
    """The last lines up to ``until`` (Unix time, s), oldest first; None if the file is missing or unreadable, for
    example on another host. A last line longer than ``LOG_BYTES`` loses its beginning."""
    path = run_dir / "logs" / f"attempt_{attempt}" / f"{actor.replace('/', '-')}.log"
    try:
        with path.open("rb") as file:
            end = size = file.seek(0, 2)
            if until < math.inf:
                parts = range(0, size + 1, LOG_BYTES)
                later = bisect_right(parts, until, key=lambda part: next(_stamps(file, part, PROBE), (0, math.inf))[1])
                # ``later`` is the index of the first part that begins after ``until``: read on from the part before.
                stamps = _stamps(file, parts[max(0, later - 1)], size)
                end = next((at for at, stamp in stamps if stamp > until), size)
            begin = max(0, end - LOG_BYTES)
            file.seek(begin)
            lines = file.read(end - begin).decode(errors="replace").splitlines()
    except OSError:
        return None
    # The first line may be torn, unless it begins the file: it is shown only if it is the only one.
    return ((lines[1:] if begin else []) or lines)[-LOG_LINES:]


def _stamps(file: BinaryIO, offset: int, most: int) -> Iterator[tuple[int, float]]:
    """Offset and timestamp of each line with a timestamp that begins at ``offset``, or at most ``most`` bytes later."""
    file.seek(max(0, offset - 1))
    if offset:
        # Skip the rest of the line before. If a line begins at ``offset``, the rest is the newline alone.
        file.readline()
    at = file.tell()
    for line in file:
        if at > offset + most:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            yield at, datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
        at += len(line)


# --- keys ---

HELP = (
    "The stage marked with a diamond sets the pace; the line below the pipeline says why. "
    "Bars split all time by kinds of states:"
)
KEYS = {"↑ ↓ enter": "an actor; n p: others", "shift+← →": "more columns"}
WORDS = {
    "flight": "trajectories in flight",
    "wait": "of these not in the engine",
    "v, lag": "version, versions behind",
    "rst": "process, engine restarts",
    "oldest": "age of a trajectory",
}


def help_page(keys: dict[str, str]) -> Group:
    """The bottleneck, the keys with their descriptions, and the titles of the rollouters' columns."""
    names = ("work", "weights", "checkpoints", "starting", "waiting")
    kinds = [text(f"{mark} {name}", kind) for (kind, mark), name in zip(BARS.items(), names, strict=True)]
    return Group(
        text("the bottleneck", "bold"),
        text(HELP, wraps=True),
        Columns(kinds, padding=(0, 3)),
        text("keys", "bold"),
        in_columns({key: text(words) for key, words in (KEYS | keys).items()}),
        text("a rollouter", "bold"),
        in_columns({title: text(words) for title, words in WORDS.items()}),
    )


class HelpScreen(PageScreen):
    """The help: the bottleneck, the keys of the app, and the columns of the rollouters."""

    keys = "esc back"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,h,enter,space", "app.pop_screen", show=False)]

    def __init__(self, bindings: Iterable[ActiveBinding]) -> None:
        """Keys of the app with the same description among the ``bindings`` stand together."""
        super().__init__()
        self._keys: dict[str, list[str]] = {}
        for node, binding, _, _ in bindings:
            if node is self.app and binding.description:
                self._keys.setdefault(binding.description, []).append(self.app.get_key_display(binding))

    def on_mount(self) -> None:
        self.show_title("asyncrl-top")
        self.show_page(help_page({" ".join(dict.fromkeys(keys)): words for words, keys in self._keys.items()}))

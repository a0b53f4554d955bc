"""The panes as styled lines, drawn from the Document alone. Pure.

A pane has lines that stay on top and entries below them, which are drawn when they are seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from asyncrl.monitor.bottleneck import by_kind, kind_of
from asyncrl.monitor.top.document import Document, RankRow, RollouterRow
from asyncrl.monitor.top.text import (
    Cell,
    Column,
    Glyphs,
    Line,
    Row,
    Span,
    Style,
    Table,
    count,
    duration,
    fixed,
    joined,
    level_bar,
    percent,
    rate,
    size,
    state_bar,
)

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events"]
PANES: tuple[PaneName, ...] = ("rollouters", "learner", "weights", "staleness", "reward", "ledger", "events")
LEVELS = ("info", "warning", "error")
BAR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user has chosen to see."""

    sort: str = "host"
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""


@dataclass(frozen=True, slots=True)
class Pane:
    """What is drawn; ``line`` gives entry ``i``, ``keys[i]`` is what it is about: an actor, or empty."""

    head: list[Line]
    keys: Sequence[str] = ()
    line: Callable[[int], Line] = field(default=lambda _number: [])

    def lines(self) -> list[Line]:
        """All of it."""
        return [*self.head, *(self.line(number) for number in range(len(self.keys)))]


def pane(name: PaneName, document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """A pane at a width."""
    return _DRAWN[name](document, choice, width, glyphs)


def title(name: PaneName, document: Document, choice: Choice) -> str:
    """The title of a pane, with what is filtered."""
    if name == "events" and choice.level != "info":
        return f"events: {choice.level}s" if choice.level == "error" else "events: warnings, errors"
    if name == "rollouters":
        return f"rollouters {sum(is_there(row.condition) for row in document.rollouters)}/{len(document.rollouters)}"
    return name


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can do anything."""
    return condition in ("ready", "starting", "silent")


# --- rollouters ---

ROLLOUTERS = (
    Column(title="rollouter", width=9, key="name"),
    Column(title="host", drop=6, most=16, key="host"),
    Column(title="state", width=10, most=15, key="state"),
    Column(title="time", width=BAR, drop=3),
    Column(title="flight", right=True, width=6, key="in_flight"),
    Column(title="wait", right=True, width=4, drop=5, key="waiting"),
    Column(title="tok/s", right=True, width=5, key="tokens_per_s"),
    Column(title="KV", right=True, width=4, drop=4, key="kv_use"),
    Column(title="v", right=True, width=4, key="version"),
    Column(title="lag", right=True, width=3, key="lag"),
    Column(title="rst", right=True, width=3, drop=2, key="restarts"),
    Column(title="oldest", right=True, width=6, drop=1, key="oldest_s"),
)
SORTS = tuple(column.key for column in ROLLOUTERS if column.key)


def _rollouters(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    chosen = [
        row
        for row in document.rollouters
        if _matches(choice, row.name, _short(row.name), row.host, row.condition, row.state)
    ]
    rows: list[Row] = []
    by_host = choice.sort == "host"
    hosts = len({row.host for row in chosen})
    for host, found in groupby(_in_order(chosen, choice), key=lambda row: row.host if by_host else ""):
        group = list(found)
        if by_host and hosts > 1:
            rows.append(_host_row(host, group))
        rows += [_rollouter_row(row, glyphs) for row in group]
    table = Table(ROLLOUTERS, rows, choice.sort)
    head, line = table.laid(width)
    if not rows:
        said = f"no rollouter matches {choice.needle}" if document.rollouters else "no rollouter is known so far"
        return Pane([head, [(said, "dim")]])
    return Pane([head], ["" if row.heading else row.key for row in rows], line)


def _short(name: str) -> str:
    return name.replace("rollouter/", "r/")


def _in_order(rows: Iterable[RollouterRow], choice: Choice) -> list[RollouterRow]:
    def key(row: RollouterRow) -> tuple[bool, float | str]:
        value = getattr(row, choice.sort)
        if choice.sort == "name":
            return False, 0.0
        return value is None, value if value is not None else 0.0

    known = sorted(rows, key=lambda row: int(row.name.partition("/")[2] or 0))
    if choice.sort == "name":
        return known[::-1] if choice.descending else known
    there = sorted((row for row in known if not key(row)[0]), key=lambda row: key(row)[1], reverse=choice.descending)
    return [*there, *(row for row in known if key(row)[0])]


def _rollouter_row(row: RollouterRow, glyphs: Glyphs) -> Row:
    state = said_state(row.condition, row.state, row.awaiting)
    lag: Style = "warn" if row.lag is not None and row.lag > 1 else ""
    return Row(
        row.name,
        (
            (_short(row.name), "" if is_there(row.condition) else "bad"),
            (row.host, "dim"),
            state,
            state_bar(by_kind(row.states), BAR, glyphs),
            (count(row.in_flight), ""),
            (count(row.waiting), ""),
            (count(row.tokens_per_s), ""),
            (percent(row.kv_use), "warn" if (row.kv_use or 0.0) > 0.95 else ""),
            (count(row.version), ""),
            (count(row.lag), lag),
            (count(row.restarts), "warn" if row.restarts else "dim"),
            (duration(row.oldest_s), ""),
        ),
    )


def _host_row(host: str, rows: Sequence[RollouterRow]) -> Row:
    there = sum(is_there(row.condition) for row in rows)
    blank: Cell = ("", "")
    return Row(
        host,
        (
            (host or "host unknown", "bold"),
            blank,
            (f"{there} of {len(rows)}", "dim" if there == len(rows) else "bad"),
            blank,
            (count(_sum(row.in_flight for row in rows)), "bold"),
            (count(_sum(row.waiting for row in rows)), "bold"),
            (count(_sum(row.tokens_per_s for row in rows)), "bold"),
            *([blank] * 5),
        ),
        heading=True,
    )


def said_state(condition: str, state: str, awaiting: str) -> Span:
    """What an actor does, and how that is meant to look."""
    if condition in ("ready", "starting") and state:
        style: Style = {"wait": "dim", "start": "start", "weights": "weights", "upkeep": "upkeep"}.get(  # type: ignore[assignment]
            kind_of(state), ""
        )
        whom = awaiting.removeprefix("weights ") if kind_of(state) in ("wait", "weights") else ""
        return f"{state} {whom}".rstrip(), style
    return condition, "start" if condition in ("starting", "absent") else "bad"


# --- learner ---

RANKS = (
    Column(title="rank", width=9),
    Column(title="host", drop=4, most=16),
    Column(title="state", width=14, most=24),
    Column(title="time", width=BAR),
    Column(title="tok/s", right=True, width=5),
    Column(title="MFU", right=True, width=4, drop=3),
    Column(title="memory", right=True, width=7),
    Column(title="GPU memory", right=True, width=10, drop=2),
)


def _learner(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    whole = next((phase.seconds for phase in document.phases if phase.name == "step"), None)
    steps: list[Line] = [
        [
            (f"{phase.name}  ", "dim"),
            (duration(phase.seconds), "bold" if phase.name == "step" else ""),
            (f"  {percent(phase.seconds / whole)}" if whole and phase.name != "step" else "", "dim"),
        ]
        for phase in document.phases
    ]
    head = [joined(steps)] if steps else [[("no step is trained so far", "dim")]]
    rows = [_rank_row(row, glyphs) for row in document.ranks if _matches(choice, row.name, row.host, row.state)]
    titles, line = Table(RANKS, rows).laid(width)
    return Pane([*head, titles], [row.key for row in rows], line)


def _rank_row(row: RankRow, glyphs: Glyphs) -> Row:
    gpu = (
        f"{size(row.gpu_bytes)}/{size(row.gpu_total_bytes)}"
        if row.gpu_bytes is not None and row.gpu_total_bytes is not None
        else count(None)
    )
    return Row(
        row.name,
        (
            (row.name, "" if is_there(row.condition) else "bad"),
            (row.host, "dim"),
            said_state(row.condition, row.state, row.awaiting),
            state_bar(by_kind(row.states), BAR, glyphs),
            (count(row.tokens_per_s), ""),
            (percent(row.mfu), ""),
            (size(row.rss_bytes), ""),
            (gpu, ""),
        ),
    )


# --- weights ---

UPDATES = (
    Column(title="v", right=True, width=4),
    Column(title="replica", width=9, most=14),
    Column(title="by", width=6, drop=3),
    Column(title="stage", right=True, width=6),
    Column(title="pause", right=True, width=6),
    Column(title="load", right=True, width=6),
    Column(title="stall", right=True, width=6),
    Column(title="bytes", right=True, width=7),
    Column(title="read", right=True, width=7, drop=2),
)


def _weights(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    view = document.weights
    head = joined(
        [
            [("gather ", "dim"), (duration(view.gather_s), "")],
            [("published ", "dim"), (size(view.publish_bytes), "")],
            [("behind ", "dim"), (count(view.behind), "")],
            [("paused ", "dim"), (count(view.paused), "")],
            [("failures ", "dim"), (count(view.failures), "bad" if view.failures else "")],
        ]
    )
    rows = [
        Row(
            update.replica,
            (
                (count(update.version), ""),
                (update.replica, ""),
                (update.transport, "dim"),
                (duration(update.stage_s), ""),
                (duration(update.pause_s), ""),
                (duration(update.load_s), ""),
                (duration(update.stall_s), ""),
                (size(update.bytes), ""),
                (size(update.encoded_bytes), ""),
            ),
        )
        for update in view.updates
        if _matches(choice, update.replica, update.transport)
    ]
    titles, line = Table(UPDATES, rows).laid(width)
    if not rows:
        return Pane([head, [("no update is reported so far", "dim")]])
    return Pane([head, titles], [row.key for row in rows], line)


# --- staleness ---


def _staleness(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    view = document.staleness
    head = joined(
        [
            [("limit ", "dim"), (f"{fixed(view.limit, 0)} of {view.max}", "")],
            [("tokens' mean ", "dim"), (fixed(view.token_mean), ""), (" most ", "dim"), (fixed(view.token_max, 0), "")],
            [("late groups ", "dim"), (count(view.late_groups), "warn" if view.late_groups else "")],
        ]
    )
    if not (view.tokens or view.groups):
        return Pane([head])
    wide = max(8, min(32, (width - 34) // 2))
    lines: list[Line] = [
        [(f"{'versions':>8}  {'tokens':<{wide}} {'':>5}{'':>5}  {'groups':<{wide}}", "dim")],
    ]
    buckets = max(len(view.tokens), len(view.groups))
    last = max((i for i in range(buckets) if _at(view.tokens, i) or _at(view.groups, i)), default=0)
    for i in range(min(buckets, max(last, view.max) + 1)):
        line: Line = [(f"{_bucket(view.edges, i):>8}  ", "dim")]
        for counts in (view.tokens, view.groups):
            value, whole = _at(counts, i), sum(counts)
            line += [
                *level_bar(value, max(counts, default=0) or None, wide, glyphs),
                (f" {count(value):>5}", ""),
                (f"{percent(value / whole) if whole else '':>5}", "dim"),
                ("  ", ""),
            ]
        lines.append(line)
    return Pane([head, lines[0]], [""] * (len(lines) - 1), lambda number: lines[number + 1])


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def _bucket(edges: Sequence[float], index: int) -> str:
    """The whole versions in a bucket, whose upper edges are inside."""
    low = int(edges[index - 1]) + 1 if index else 0
    if index >= len(edges):
        return f"≥ {low}"
    high = int(edges[index])
    return f"{high}" if high <= low else f"{low}–{high}"


# --- reward, ledger ---


def _reward(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    view = document.reward
    busy = by_kind(view.states).get("work")
    return _facts(
        [
            ("rate", f"{rate(view.rate)}/s", ""),
            ("workers", f"{view.workers or count(None)}", ""),
            ("at work", percent(busy), ""),
            ("running", count(view.running), ""),
            ("queued", count(view.queued), ""),
            ("time p50", _at_most(view.p50_s), ""),
            ("time p99", _at_most(view.p99_s), ""),
            ("timeouts", count(view.timeouts), "warn" if view.timeouts else ""),
            ("killed", count(view.killed), "warn" if view.killed else ""),
            ("failed", count(view.failed), "bad" if view.failed else ""),
        ],
        [state_bar(by_kind(view.states), min(40, width), glyphs)] if view.states else [],
        width,
    )


def _ledger(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    view = document.ledger
    bars = []
    if view.outstanding is not None and view.gate:
        wide = max(10, min(40, width - 36))
        full = view.outstanding >= view.gate
        bars.append(
            [
                ("outstanding  ", "dim"),
                *level_bar(view.outstanding, view.gate, wide, glyphs, "warn" if full else "level"),
                (f"  {count(view.outstanding)} of {count(view.gate)} groups", ""),
            ]
        )
    return _facts(
        [
            ("trained", count(view.trained), ""),
            ("filtered", count(view.filtered), ""),
            ("quarantined", count(view.quarantined), "bad" if view.quarantined else ""),
            ("outstanding", count(view.outstanding), ""),
            ("in the buffer", count(view.buffered), ""),
            ("a step takes", f"{view.groups_per_step} groups", ""),
        ],
        bars,
        width,
    )


def _at_most(seconds: float | None) -> str:
    return count(None) if seconds is None else f"≤ {duration(seconds)}" if seconds < float("inf") else "long"


def _facts(facts: Sequence[tuple[str, str, Style]], bars: Sequence[Line], width: int) -> Pane:
    """Names and values in as many columns as there is room for, filled downwards."""
    name_wide = max(len(name) for name, _, _ in facts)
    value_wide = max(len(value) for _, value, _ in facts)
    across = max(1, min(3, (width + 4) // (name_wide + value_wide + 6)))
    down = -(-len(facts) // across)
    lines: list[Line] = [*bars]
    for i in range(down):
        line: Line = []
        for name, value, style in facts[i::down]:
            line += [(f"{name:<{name_wide}}  ", "dim"), (f"{value:<{value_wide}}    ", style)]
        lines.append(line)
    return Pane([], [""] * len(lines), lambda number: lines[number])


# --- events ---

EVENTS = (
    Column(title="time", width=8),
    Column(title="level", width=7, drop=1),
    Column(title="actor", width=9, most=18),
    Column(title="event", width=20, most=20),
)
LEVEL_STYLES: dict[str, Style] = {"info": "dim", "warning": "warn", "error": "bad", "critical": "bad"}


def _events(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    least = LEVELS.index(choice.level)
    rows = [
        Row(
            event.actor,
            (
                (time.strftime("%H:%M:%S", time.localtime(event.wall)), "dim"),
                (event.level, LEVEL_STYLES.get(event.level, "")),
                (event.actor or "run", ""),
                (" ".join(event.text.split()), LEVEL_STYLES.get(event.level, "") if event.level != "info" else ""),
            ),
        )
        for event in reversed(document.events)
        if (LEVELS.index(event.level) if event.level in LEVELS else len(LEVELS)) >= least
        and _matches(choice, event.actor, event.text, event.level)
    ]
    titles, line = Table(EVENTS, rows).laid(width)
    return Pane([titles], [row.key for row in rows], line) if rows else Pane([[("nothing to tell", "dim")]])


def _matches(choice: Choice, *texts: str) -> bool:
    needle = choice.needle.lower()
    return not needle or any(needle in text.lower() for text in texts)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_DRAWN: dict[PaneName, Callable[[Document, Choice, int, Glyphs], Pane]] = {
    "rollouters": _rollouters,
    "learner": _learner,
    "weights": _weights,
    "staleness": _staleness,
    "reward": _reward,
    "ledger": _ledger,
    "events": _events,
}

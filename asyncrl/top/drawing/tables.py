"""The panes of one row for each of something: rollouters, ranks, weight updates, events and hosts of episodes. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from asyncrl.snapshot import Event
from asyncrl.telemetry.snapshots.rates import total
from asyncrl.text.numbers import ABSENT, count, duration, fixed, percent, size
from asyncrl.top.drawing.layout import (
    BAR,
    LEVELS,
    Cell,
    Choice,
    Column,
    Pane,
    Row,
    Table,
    is_amiss,
    is_there,
    matches,
    said_state,
)
from asyncrl.top.drawing.text import Glyphs, Line, Style, fitting, joined, level_bar, state_bar
from asyncrl.top.figures.bottleneck import by_kind
from asyncrl.top.figures.document import (
    Document,
    EpisodeHostRow,
    EpisodeStageRow,
    EpisodesView,
    RankRow,
    RollouterRow,
)

ROLLOUTERS = (
    Column(title="rollouter", width=9, key="name"),
    Column(title="host", drop=7, most=16, key="host"),
    Column(title="state", width=10, most=15, key="state"),
    Column(title="time", width=BAR, drop=3),
    Column(title="flight", right=True, width=6, key="in_flight"),
    Column(title="wait", right=True, width=4, drop=5, key="waiting"),
    Column(title="most", right=True, width=4, drop=7, key="concurrency"),
    Column(title="tok/s", right=True, width=5, key="tokens_per_s"),
    Column(title="KV", right=True, width=4, drop=4, key="kv_use"),
    Column(title="v", right=True, width=3, key="version"),
    Column(title="lag", right=True, width=3, key="lag"),
    Column(title="stall", right=True, width=6, drop=6, spare=True, key="stall_s"),
    Column(title="drift", right=True, width=6, drop=5, spare=True, key="drift"),
    Column(title="worst", right=True, width=6, drop=8, spare=True, key="drift_largest"),
    Column(title="rst", right=True, width=3, drop=2, key="restarts"),
    Column(title="oldest", right=True, width=6, drop=1, key="oldest_s"),
)
WORDS = ("name", "host", "state")
"""Columns that are sorted upwards at first; numbers downwards."""
SORTS = tuple(column.key for column in ROLLOUTERS if column.key)


def rollouters(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """A row for each rollouter, by host where there are several."""
    chosen = [
        row
        for row in document.rollouters
        if matches(choice, row.name, _short(row.name), row.host, row.condition, row.state)
    ]
    rows: list[Row] = []
    by_host = choice.sort == "host"
    hosts = len({row.host for row in chosen})
    for host, found in groupby(_in_order(chosen, choice), key=lambda row: row.host if by_host else ""):
        group = list(found)
        if by_host and hosts > 1:
            rows.append(_host_row(host, group))
        rows += [_rollouter_row(row, glyphs) for row in group]
    said = f"no rollouter matches {choice.needle}" if document.rollouters else "no rollouter is known so far"
    return Pane([] if rows else [[(said, "dim")]], Table(ROLLOUTERS, rows, choice.sort, choice.descending))


def sorted_next(choice: Choice) -> Choice:
    """The choice, sorted by the next column: words from the first on, numbers from the largest."""
    sort = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
    return replace(choice, sort=sort, descending=sort not in WORDS)


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
            (_short(row.name), "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            state,
            state_bar(by_kind(row.states), BAR, glyphs),
            (count(row.in_flight), ""),
            (count(row.waiting), ""),
            (count(row.concurrency), "dim"),
            (count(row.tokens_per_s), ""),
            (percent(row.kv_use), "warn" if (row.kv_use or 0.0) > 0.95 else ""),
            (count(row.version), ""),
            (count(row.lag), lag),
            (duration(row.stall_s), ""),
            (fixed(row.drift, 3), "warn" if row.drift_warnings else ""),
            (fixed(row.drift_largest, 3), "warn" if row.drift_warnings else "dim"),
            (count(row.restarts), "warn" if row.restarts else "dim"),
            (duration(row.oldest_s), ""),
        ),
    )


def _host_row(host: str, rows: Sequence[RollouterRow]) -> Row:
    there = sum(is_there(row.condition) for row in rows)
    blank: Cell = ("", "")
    return Row(
        rows[0].name,
        (
            (host or "host unknown", "bold"),
            blank,
            (f"{there} of {len(rows)}", "bad" if any(is_amiss(row.condition) for row in rows) else "dim"),
            blank,
            (count(total(row.in_flight for row in rows)), "bold"),
            (count(total(row.waiting for row in rows)), "bold"),
            (count(total(row.concurrency for row in rows)), "bold"),
            (count(total(row.tokens_per_s for row in rows)), "bold"),
            *([blank] * 8),
        ),
        heading=True,
    )


RANKS = (
    Column(title="rank", width=9),
    Column(title="host", drop=4, most=16),
    Column(title="state", width=14, most=24),
    Column(title="time", width=BAR),
    Column(title="memory", right=True, width=7),
    Column(title="GPU memory", right=True, width=10, drop=2, spare=True),
)


def learner(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Phases of a step, figures of the newest one, and a row for each rank."""
    rows = [_rank_row(row, glyphs) for row in document.ranks if matches(choice, row.name, row.host, row.state)]
    return Pane([_step(document), _learning(document, width), _speed(document)], Table(RANKS, rows), "learner/0")


def _step(document: Document) -> Line:
    """Duration of a step, and of each of its phases."""
    seconds = {phase.name: phase.seconds for phase in document.phases}
    if not seconds:
        return [("only a first step is trained so far" if document.run.step else "no step is trained so far", "dim")]
    whole = seconds.pop("step", None)
    phases: list[Line] = [
        [(f"{name} ", "dim"), (duration(each), ""), (f" {percent(each / whole)}" if whole else "", "dim")]
        for name, each in seconds.items()
    ]
    return joined([[("step ", "dim"), (duration(whole), "bold")], *phases])


def _learning(document: Document, width: int) -> Line:
    """Figures of the newest step. A gradient or a learning rate of 0 stands out: nothing is learnt from it."""
    found = document.learning
    figures = {"loss": found.loss, "grad norm": found.grad_norm, "entropy": found.entropy, "KL": found.kl}
    figures["lr"] = found.lr
    styles: dict[str, Style] = {name: "bad" for name in ("grad norm", "lr") if figures[name] == 0}
    return fitting(
        [[(f"{name} ", "dim"), (fixed(value, 3), styles.get(name, ""))] for name, value in figures.items()], width
    )


def _speed(document: Document) -> Line:
    """Speed and reward. A step is of all ranks, and so are its tokens and its share of the peak."""
    first = document.ranks[0] if document.ranks else None
    parts: list[Line] = [
        [("trained tokens/s ", "dim"), (count(first.tokens_per_s if first is not None else None), "")],
    ]
    if first is not None and first.mfu is not None:
        parts.append([("MFU ", "dim"), (percent(first.mfu), "")])
    if (reward := document.learning.reward) is not None:
        spread = document.learning.reward_std
        parts.append(
            [
                ("reward ", "dim"),
                (fixed(reward, 3), ""),
                (f" ± {fixed(spread, 3)}" if spread is not None else "", "dim"),
            ]
        )
    if (engine_kl := document.learning.engine_kl) is not None:
        # A step without tokens of equal weights has none.
        parts.append([("engine KL ", "dim"), (fixed(engine_kl, 3), "")])
    return joined(parts)


def _rank_row(row: RankRow, glyphs: Glyphs) -> Row:
    gpu = (
        f"{size(row.gpu_bytes)}/{size(row.gpu_total_bytes)}"
        if row.gpu_bytes is not None and row.gpu_total_bytes is not None
        else count(None)
    )
    return Row(
        row.name,
        (
            (row.name, "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            said_state(row.condition, row.state, row.awaiting),
            state_bar(by_kind(row.states), BAR, glyphs),
            (size(row.rss_bytes), ""),
            (gpu, ""),
        ),
    )


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


def weights(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The newest publication, and the newest updates of replicas."""
    view = document.weights
    version = joined(
        [
            [("learner idle ", "dim"), (duration(view.idle_s), "")],
            [("gather ", "dim"), (duration(view.gather_s), "")],
            [("published ", "dim"), (size(view.publish_bytes), "")],
        ]
    )
    replicas = joined(
        [
            [("behind ", "dim"), (count(view.behind), "")],
            [("paused ", "dim"), (count(view.paused), "")],
            [("failures ", "dim"), (count(view.failures), "bad" if view.failures else "")],
            [("prefilled again ", "dim"), (count(view.reprefill_tokens), ""), (" an update", "dim")],
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
        if matches(choice, update.replica, update.transport)
    ]
    head = [version, replicas]
    if not rows:
        said = f"no update matches {choice.needle}" if view.updates else "no update is reported so far"
        return Pane([*head, [(said, "dim")]], about="parameter_server/0")
    return Pane(head, Table(UPDATES, rows), "parameter_server/0")


EVENTS = (
    Column(title="time", width=8),
    Column(title="level", width=7, drop=1),
    Column(title="actor", width=9, most=18),
    Column(title="event", width=20, most=20),
)
LEVEL_STYLES: dict[str, Style] = {"info": "dim", "warning": "warn", "error": "bad", "critical": "bad"}
SAME_DAY_S = 43_200.0
"""Age (s) of the oldest event above which the date is told too."""
CONTROLLER = "controller/0"
"""Actor that tells what happened to the run as a whole."""


def events(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Events from a level on."""
    shown = [event for event in reversed(document.events) if _is_wanted(event, choice)]
    if not shown:
        return Pane([[("nothing to tell", "dim")]], about=CONTROLLER)
    dated = document.wall - shown[-1].wall > SAME_DAY_S
    rows = [
        Row(
            event.actor or CONTROLLER,
            (
                (time.strftime("%m-%d %H:%M:%S" if dated else "%H:%M:%S", time.localtime(event.wall)), "dim"),
                (event.level, LEVEL_STYLES.get(event.level, "")),
                (event.actor or "run", ""),
                (" ".join(event.text.split()), LEVEL_STYLES.get(event.level, "") if event.level != "info" else ""),
            ),
        )
        for event in shown
    ]
    return Pane([], Table(EVENTS, rows))


def _is_wanted(event: Event, choice: Choice) -> bool:
    level = LEVELS.index(event.level) if event.level in LEVELS else len(LEVELS)
    return level >= LEVELS.index(choice.level) and matches(choice, event.actor, event.text, event.level)


STAGE_WIDTH = 32
SHARE_BAR = 24
HOSTS = (
    Column(title="played by", width=9),
    Column(title="host", drop=3, most=16),
    Column(title="state", width=6, most=12),
    Column(title="time", width=BAR, drop=4),
    Column(title="workers", right=True, drop=1),
    Column(title="open", right=True, width=4),
    Column(title="wait", right=True, width=4, drop=2),
    Column(title="played", right=True),
    Column(title="failed", right=True),
    Column(title="tools", right=True, width=5, drop=5),
    Column(title="errors", right=True, drop=6),
    Column(title="lost", right=True, drop=7),
    Column(title="rst", right=True, width=3, drop=8),
)


def episodes(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Open episodes by stage, the ends of those before, and a row for each host."""
    view = document.episodes
    if view is None:
        return Pane([[("a prompt has one response: there are no episodes", "dim")]])
    head = _head(view, width)
    if view.stages:
        head += _stages(view.stages, glyphs)
    rows = [_host(row, glyphs) for row in view.hosts if matches(choice, row.name, row.host, row.condition)]
    return Pane(head, Table(HOSTS, rows))


def summary(view: EpisodesView) -> str:
    """Numbers of open episodes, in all and by stage, the most first."""
    at = [f"{count(row.open)} {row.name}" for row in view.stages if row.open]
    return f"{count(view.open)} episodes" + (f": {', '.join(at)}" if at else "")


def _head(view: EpisodesView, width: int) -> list[Line]:
    oldest: Line = [("oldest ", "dim"), (duration(view.oldest_s if view.open else None), "")]
    cost: Style = "warn" if (view.cost_factor or 0.0) > 2 else ""
    p95 = view.turns_p95
    figures: list[Line] = [
        [("turns ", "dim"), (fixed(view.turns_mean, 1), "")],
        [("p95 ", "dim"), (ABSENT if p95 is None else f"≤ {p95:g}" if p95 < float("inf") else "many", "")],
        [("context ", "dim"), (f"{count(view.prompt_tokens_mean)} tokens", "")],
        [("cost ", "dim"), (fixed(view.cost_factor), cost)],
        [("prefilled again ", "dim"), (count(view.reprefill_tokens), "")],
        [("malformed calls ", "dim"), (count(view.malformed_calls), "warn" if view.malformed_calls else "")],
    ]
    ends: list[Line] = [
        [("ended ", "dim"), (_counts(view.ended), "")],
        [("failed ", "dim"), (_counts(view.failed), "bad" if view.failed else "")],
        [("forks ", "dim"), (_counts(view.forks), "")],
    ]
    return [
        joined([oldest, [(summary(view), "bold")]]),
        fitting(figures, width),
        fitting(ends, width),
    ]


def _counts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _stages(rows: Sequence[EpisodeStageRow], glyphs: Glyphs) -> list[Line]:
    """Titles, and a line for each stage: its open episodes, and its share of the time of those that have ended."""
    wide = min(STAGE_WIDTH, max(12, *(len(row.name) for row in rows)))
    lines: list[Line] = [[(f"{'stage':<{wide}}   open  time", "dim")]]
    for row in rows:
        figures = f"  {count(row.open):>5}  {percent(row.share):>4}  "
        bar = level_bar(row.share or 0.0, 1.0, SHARE_BAR, glyphs)
        lines.append([(f"{row.name[:wide]:<{wide}}", "bold" if row.open else "dim"), (figures, ""), *bar])
    return lines


def _host(row: EpisodeHostRow, glyphs: Glyphs) -> Row:
    return Row(
        row.name,
        (
            (row.name.replace("episodes/", "e/"), "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            said_state(row.condition, "", ""),
            state_bar(row.kinds, BAR, glyphs),
            (f"{row.workers}" if row.workers else ABSENT, ""),
            (count(row.open), ""),
            (count(row.waiting), "warn" if row.waiting else ""),
            (count(row.played), ""),
            (count(row.failed), "bad" if row.failed else ""),
            (count(row.tool_calls), ""),
            (count(row.tool_errors), "warn" if row.tool_errors else ""),
            (count(row.lost_workers), "warn" if row.lost_workers else ""),
            (str(row.restarts), "warn" if row.restarts else "dim"),
        ),
    )

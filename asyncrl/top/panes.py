"""The panes by name, one by one or as a page of text. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.text import Text

from asyncrl.telemetry.metrics_line import HIGH_TRUNCATION
from asyncrl.telemetry.snapshots.rates import total
from asyncrl.text.numbers import ABSENT, count, duration, exact, fixed, percent, rate, size
from asyncrl.top.drawing.columns import DATE, EVENTS, RANKS, ROLLOUTERS, SHORT, UPDATES, is_amiss, is_there
from asyncrl.top.drawing.layout import LEVELS, Cell, Choice, Pane, PaneName, Row, Table, row, row_of, table_of
from asyncrl.top.drawing.text import (
    Glyphs,
    Line,
    Style,
    columns,
    fitting,
    joined,
    length,
    level_bar,
    said,
    state_bar,
    warned,
)
from asyncrl.top.episode_pane import episodes
from asyncrl.top.figures.bottleneck import by_kind
from asyncrl.top.figures.document import Document, RollouterRow
from asyncrl.top.pipeline import header, pipeline

CONTROLLER = "controller/0"
"""Actor that tells what happened to the run as a whole."""


def _there(rows: Sequence[Any]) -> str:
    return f"{sum(is_there(each.condition) for each in rows)}/{len(rows)}"


# --- rollouters ---

WORDS = ("name", "host", "state")
"""Columns that are sorted upwards at first; numbers downwards."""
SORTS = tuple(column.key for column in ROLLOUTERS if column.key)
SUMMED = {"flight": "in_flight", "wait": "waiting", "most": "concurrency", "tok/s": "tokens_per_s"}
"""Columns that a host has the sums of."""


def rollouters(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """A row for each rollouter, by host where there are several."""
    chosen = [
        row
        for row in document.rollouters
        if choice.matches(row.name, row.name.replace(SHORT, "r/"), row.host, row.condition, row.state)
    ]
    by_host = choice.sort == "host" and len({row.host for row in chosen}) > 1
    rows: list[Row] = []
    for host, found in groupby(_in_order(chosen, choice), key=lambda row: row.host if by_host else ""):
        group = list(found)
        if by_host:
            rows.append(_host_row(host, group))
        rows += [row_of(ROLLOUTERS, each, each.name, glyphs) for each in group]
    words = f"no rollouter matches {choice.needle}" if document.rollouters else "no rollouter is known so far"
    return Pane([] if rows else [[(words, "dim")]], Table(ROLLOUTERS, rows, choice.sort, choice.descending))


def sorted_next(choice: Choice) -> Choice:
    """The choice, sorted by the next column: words from the first on, numbers from the largest."""
    sort = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
    return replace(choice, sort=sort, descending=sort not in WORDS)


def _in_order(rows: Iterable[RollouterRow], choice: Choice) -> list[RollouterRow]:
    """In the order chosen; those of which nothing is known come last."""
    known = sorted(rows, key=lambda row: int(row.name.partition("/")[2]))
    if choice.sort == "name":
        return known[::-1] if choice.descending else known
    there = [row for row in known if getattr(row, choice.sort) is not None]
    there.sort(key=lambda row: getattr(row, choice.sort), reverse=choice.descending)
    return [*there, *(row for row in known if getattr(row, choice.sort) is None)]


def _host_row(host: str, rows: Sequence[RollouterRow]) -> Row:
    there = f"{sum(is_there(each.condition) for each in rows)} of {len(rows)}"
    cells: dict[str, Cell] = {
        "rollouter": (host or "host unknown", "bold"),
        "state": (there, "bad" if any(is_amiss(each.condition) for each in rows) else "dim"),
    }
    for title, name in SUMMED.items():
        cells[title] = count(total(getattr(each, name) for each in rows)), "bold"
    return row(rows[0].name, (cells.get(column.title, "") for column in ROLLOUTERS), heading=True)


# --- learner ---


def learner(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Phases of a step, figures of the newest one, and a row for each rank."""
    ranks = [row for row in document.ranks if choice.matches(row.name, row.host, row.state)]
    head = [_step(document), _learning(document, width), _speed(document), *_evaluations(document, width)]
    return Pane(head, table_of(RANKS, ranks, glyphs), "learner/0")


def _step(document: Document) -> Line:
    """Duration of a step, and of each of its phases."""
    seconds = {phase.name: phase.seconds for phase in document.phases}
    if not seconds:
        return [("only a first step is trained so far" if document.run.step else "no step is trained so far", "dim")]
    whole = seconds.pop("step", None)
    phases: list[Line] = [
        [*said(name, duration(each)), (f" {percent(each / whole)}" if whole else "", "dim")]
        for name, each in seconds.items()
    ]
    return joined([said("step", duration(whole), "bold"), *phases])


def _learning(document: Document, width: int) -> Line:
    """Figures of the newest step. A gradient or a learning rate of 0 stands out: nothing is learnt from it."""
    found = document.learning
    figures = {
        "loss": found.loss,
        "grad norm": found.grad_norm,
        "entropy": found.entropy,
        "KL": found.kl,
        "lr": found.lr,
    }
    stand_out = {name for name in ("grad norm", "lr") if figures[name] == 0}
    parts = [said(name, fixed(value, 3), "bad" if name in stand_out else "") for name, value in figures.items()]
    return fitting(parts, width)


def _speed(document: Document) -> Line:
    """Speed and reward. A step is of all ranks, and so are its tokens and its share of the peak."""
    first, found = next(iter(document.ranks), None), document.learning
    parts = [said("trained tokens/s", count(first.tokens_per_s if first is not None else None))]
    if first is not None and first.mfu is not None:
        parts.append(said("MFU", percent(first.mfu)))
    if found.reward is not None:
        spread = f" ± {fixed(found.reward_std, 3)}" if found.reward_std is not None else ""
        parts.append([*said("reward", fixed(found.reward, 3)), (spread, "dim")])
    if found.truncated is not None:
        parts.append(said("cut", percent(found.truncated), "bad" if found.truncated >= HIGH_TRUNCATION else ""))
    if found.engine_kl is not None:
        # A step without tokens of equal weights has none.
        parts.append(said("engine KL", fixed(found.engine_kl, 3)))
    return joined(parts)


def _evaluations(document: Document, width: int) -> list[Line]:
    """A line for each evaluation that has more to show than the mean in the header."""
    lines = []
    for name, found in sorted(document.run.eval_rows.items()):
        parts = [said(f"pass@{k}", fixed(value, 3)) for k, value in found.pass_at.items()]
        if found.length_mean is not None:
            parts.append(said("length", count(found.length_mean)))
        if found.truncated is not None:
            parts.append(said("cut", percent(found.truncated), "bad" if found.truncated >= HIGH_TRUNCATION else ""))
        parts += [said(component, fixed(value, 3)) for component, value in sorted(found.components.items())]
        if parts:
            lines.append(fitting([[(f"eval {name}", "dim")], *parts], width))
    return lines


# --- weights ---


def weights(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The newest publication, and the newest updates of replicas."""
    view, about = document.weights, "parameter_server/0"
    head = [
        joined(
            [
                said("learner idle", duration(view.idle_s)),
                said("gather", duration(view.gather_s)),
                said("published", size(view.publish_bytes)),
            ]
        ),
        joined(
            [
                said("behind", count(view.behind)),
                said("paused", count(view.paused)),
                said("failures", count(view.failures), "bad" if view.failures else ""),
                [*said("prefilled again", count(view.reprefill_tokens)), (" an update", "dim")],
            ]
        ),
    ]
    rows = [
        row_of(UPDATES, update, update.replica, glyphs)
        for update in view.updates
        if choice.matches(update.replica, update.transport)
    ]
    if not rows:
        words = f"no update matches {choice.needle}" if view.updates else "no update is reported so far"
        return Pane([*head, [(words, "dim")]], about=about)
    return Pane(head, Table(UPDATES, rows, newest_first=True), about)


# --- staleness ---

LABEL = 10
FIGURES = LABEL + 2 + 2 * 12
"""Columns that are no bars."""


def staleness(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The working limit, the newest step, and a histogram since the learner started."""
    view = document.staleness
    late = f"{count(view.late_groups)} of {document.ledger.groups_per_step} groups"
    became = ((view.late_trained, "trained"), (view.late_masked, "masked"))
    so_far = ", ".join(f"{count(groups)} {word}" for groups, word in became if groups)
    head = joined(
        [
            said("limit", f"{fixed(view.limit, 0)} of {view.max}"),
            said(f"step {document.run.step}: mean", fixed(view.token_mean)),
            said("most", fixed(view.token_max, 0)),
            said("late", late, warned(view.late_groups)),
            said("so far", so_far) if so_far else [],
        ]
    )
    if not (view.tokens or view.groups):
        return Pane([head], about="learner/0")
    wide = max(6, min(32, (width - FIGURES) // 2))
    titles: Line = [(f"{'versions':>{LABEL}}  {'tokens':<{wide + 12}}{'groups':<{wide + 10}}", "dim")]
    # Up to the last bucket that holds something, and up to that of staleness.max.
    held = max((i for counts in (view.tokens, view.groups) for i, n in enumerate(counts) if n), default=0)
    shown = range(max(held, bisect_left(view.edges, view.max)) + 1)
    return Pane([head, titles, *(_bucket_line(document, i, wide, glyphs) for i in shown)], about="learner/0")


def _bucket_line(document: Document, index: int, wide: int, glyphs: Glyphs) -> Line:
    view = document.staleness
    # The whole versions in a bucket, whose upper edges are inside.
    low = int(view.edges[index - 1]) + 1 if index else 0
    high = int(view.edges[index]) if index < len(view.edges) else None
    label = f"{low}+" if high is None else f"{low}" if high <= low else f"{low}–{high}"
    # Beyond the limit is beyond what the gate can hold: stragglers, which staleness.late is for.
    late = low > view.max
    line: Line = [(f"{f'late {label}' if late else label:>{LABEL}}  ", "warn" if late else "dim")]
    for counts in (view.tokens, view.groups):
        value, whole = counts[index] if index < len(counts) else 0, sum(counts)
        line += [
            *level_bar(value, max(counts, default=0) or None, wide, glyphs, "warn" if late else "level"),
            (f" {count(value):>5}", ""),
            (f"{percent(value / whole) if whole else '':>5} ", "dim"),
        ]
    return line


# --- reward, ledger ---

ROOMY = 40
"""Width from which on there is room for units."""


def reward(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Tasks of the pool: its rate, those at hand, and those that went wrong."""
    view = document.reward
    kinds = by_kind(view.states)
    facts: list[tuple[str, str, Style]] = [
        ("tasks/s", rate(view.rate), ""),
        ("workers", f"{view.workers or ABSENT}", ""),
        ("at work", percent(kinds.get("work")), ""),
        ("running", count(view.running), ""),
        ("queued", count(view.queued), ""),
        ("time p50", _at_most(view.p50_s), ""),
        ("time p99", _at_most(view.p99_s), ""),
        ("timeouts", count(view.timeouts), warned(view.timeouts)),
        ("killed", count(view.killed), warned(view.killed)),
        ("failed", count(view.failed), "bad" if view.failed else ""),
    ]
    bars = [state_bar(kinds, min(40, width), glyphs)] if view.states else []
    return Pane([*bars, *columns(facts, width, most=3)], about="reward/0")


def _at_most(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"≤ {duration(seconds)}" if seconds < float("inf") else "long"


def ledger(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Prompt groups by what became of them, and those under way against the gate."""
    view = document.ledger
    bars: list[Line] = []
    facts: list[tuple[str, str, Style]] = [
        ("trained", exact(view.trained), ""),
        ("filtered", exact(view.filtered), ""),
        ("quarantined", exact(view.quarantined), "bad" if view.quarantined else ""),
        ("in the buffer", count(view.buffered), ""),
        ("a step takes", f"{view.groups_per_step} groups", ""),
    ]
    if view.left_out:
        facts.insert(3, ("left out", exact(view.left_out), ""))
    if view.outstanding is not None and view.gate:
        full = view.outstanding >= view.gate
        bar = level_bar(view.outstanding, view.gate, max(4, min(40, width - 36)), glyphs, "warn" if full else "level")
        figures = f"  {count(view.outstanding)} of {count(view.gate)}{' groups' if width >= ROOMY else ''}"
        bars = [[("outstanding  ", "dim"), *bar, (figures, "")]]
    else:
        facts.insert(3, ("outstanding", count(view.outstanding), ""))
    return Pane([*bars, *columns(facts, width, most=3)], about="dataloader/0")


# --- events ---

SAME_DAY_S = 43_200.0
"""Age (s) of the oldest event above which the date is told too."""


def events(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The pane of events of the chosen level and above, the newest first."""
    wanted = LEVELS[LEVELS.index(choice.level) :]
    shown = [
        event
        for event in reversed(document.events)
        if (event.level in wanted or event.level not in LEVELS) and choice.matches(event.actor, event.text, event.level)
    ]
    if not shown:
        return Pane([[("nothing to tell", "dim")]], about=CONTROLLER)
    first = DATE if document.wall - shown[-1].wall > SAME_DAY_S else EVENTS[0]
    columns = (first, *EVENTS[1:])
    rows = [row_of(columns, event, event.actor or CONTROLLER, glyphs) for event in shown]
    return Pane([], Table(columns, rows, newest_first=True))


# --- all of them ---

_DRAWN: dict[PaneName, Callable[[Document, Choice, int, Glyphs], Pane]] = {
    "rollouters": rollouters,
    "learner": learner,
    "weights": weights,
    "staleness": staleness,
    "reward": reward,
    "ledger": ledger,
    "events": events,
    "episodes": episodes,
}
PANES: tuple[PaneName, ...] = tuple(_DRAWN)
MOST_SHOWN: dict[PaneName, int] = {"events": 20, "weights": 8}
"""Entries, in a page, of panes that may have many."""


def panes_of(document: Document | None) -> tuple[PaneName, ...]:
    """Panes that this run has something for."""
    return PANES if document is not None and document.episodes is not None else PANES[: PANES.index("episodes")]


def pane(name: PaneName, document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The pane of this name, ``width`` cells wide."""
    return _DRAWN[name](document, choice, width, glyphs)


def title(name: PaneName, document: Document, choice: Choice) -> str:
    """The title of a pane, with what is filtered."""
    if name == "events" and choice.level != "info":
        return f"events: {choice.level}s" if choice.level == "error" else "events: warnings, errors"
    if name == "rollouters":
        return f"rollouters {_there(document.rollouters)}"
    if name == "episodes" and document.episodes is not None:
        return f"episodes {_there(document.episodes.hosts)}"
    return name


def page(document: Document, width: int, glyphs: Glyphs, *, whole: bool = False) -> str:
    """All panes, one below the other: the newest of events and updates, and events as a ``whole`` if that is asked for,
    however wide they are."""
    choice = Choice()
    lines = [*header(document, width, glyphs), Text(), *pipeline(document, width, glyphs)]
    longest = max((length([(event.text, "")]) for event in document.events), default=0) if whole else 0
    for name in panes_of(document):
        wide = width + longest if name == "events" else width
        drawn = pane(name, document, choice, wide, glyphs).lines(wide, glyphs, MOST_SHOWN.get(name))
        lines += [Text(), Text(title(name, document, choice).upper()), *drawn]
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)

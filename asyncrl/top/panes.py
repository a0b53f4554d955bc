"""The panes of gauges, staleness, reward and ledger; and all panes by name, one by one or as a page of text. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from rich.text import Text

from asyncrl.text.numbers import count, duration, exact, fixed, percent, rate
from asyncrl.top.drawing.layout import Choice, Pane, PaneName, facts, is_there
from asyncrl.top.drawing.tables import episodes, events, learner, rollouters, weights
from asyncrl.top.drawing.text import Glyphs, Line, Style, joined, level_bar, state_bar
from asyncrl.top.figures.bottleneck import by_kind
from asyncrl.top.figures.document import Document, StalenessView
from asyncrl.top.pipeline import header, pipeline

LABEL = 10
FIGURES = LABEL + 2 + 2 * 12
"""Columns that are no bars."""


def staleness(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The working limit, the newest step, and a histogram since the learner started."""
    view, run = document.staleness, document.run
    late = f"{count(view.late_groups)} of {document.ledger.groups_per_step} groups"
    head: Line = joined(
        [
            [("limit ", "dim"), (f"{fixed(view.limit, 0)} of {view.max}", "")],
            [(f"step {run.step}: mean ", "dim"), (fixed(view.token_mean), "")],
            [("most ", "dim"), (fixed(view.token_max, 0), "")],
            [("late ", "dim"), (late, "warn" if view.late_groups else "")],
            [("so far ", "dim"), (_so_far(view), "")] if _so_far(view) else [],
        ]
    )
    if not (view.tokens or view.groups):
        return Pane([head], about="learner/0")
    wide = max(6, min(32, (width - FIGURES) // 2))
    titles: Line = [(f"{'versions':>{LABEL}}  {'tokens':<{wide + 12}}{'groups':<{wide + 10}}", "dim")]
    lines = [_bucket_line(document, i, wide, glyphs) for i in range(buckets(view))]
    return Pane([head, titles, *lines], about="learner/0")


def _so_far(view: StalenessView) -> str:
    """Words for what became of late groups; empty while there were none."""
    found = {
        "trained": view.late_trained,
        "masked": view.late_masked,
        "waited for": view.waited,
        "requeued": view.requeued,
    }
    return ", ".join(f"{count(number)} {words}" for words, number in found.items() if number)


def buckets(view: StalenessView) -> int:
    """Number of buckets that are shown: up to the last that holds something, and up to that of staleness.max."""
    held = max((i for counts in (view.tokens, view.groups) for i, n in enumerate(counts) if n), default=0)
    return max(held, bisect_left(view.edges, view.max)) + 1


def _bucket_line(document: Document, index: int, wide: int, glyphs: Glyphs) -> Line:
    view = document.staleness
    low, label = _bucket(view.edges, index)
    # Beyond the limit is beyond what the gate can hold: stragglers, which staleness.late is for.
    late = low > view.max
    style: Style = "warn" if late else "level"
    line: Line = [(f"{f'late {label}' if late else label:>{LABEL}}  ", "warn" if late else "dim")]
    for counts in (view.tokens, view.groups):
        value, whole = counts[index] if index < len(counts) else 0, sum(counts)
        line += [
            *level_bar(value, max(counts, default=0) or None, wide, glyphs, style),
            (f" {count(value):>5}", ""),
            (f"{percent(value / whole) if whole else '':>5} ", "dim"),
        ]
    return line


def _bucket(edges: Sequence[float], index: int) -> tuple[int, str]:
    """The whole versions in a bucket, whose upper edges are inside: the least of them, and all."""
    low = int(edges[index - 1]) + 1 if index else 0
    if index >= len(edges):
        return low, f"{low}+"
    high = int(edges[index])
    return low, f"{high}" if high <= low else f"{low}–{high}"


def reward(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Tasks of the pool: its rate, those at hand, and those that went wrong."""
    view = document.reward
    busy = by_kind(view.states).get("work")
    return facts(
        [
            ("tasks/s", rate(view.rate), ""),
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
        "reward/0",
    )


def _at_most(seconds: float | None) -> str:
    return count(None) if seconds is None else f"≤ {duration(seconds)}" if seconds < float("inf") else "long"


ROOMY = 40
"""Width from which on there is room for units."""


def ledger(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Prompt groups by what became of them, and those under way against the gate."""
    view = document.ledger
    bars: list[Line] = []
    if view.outstanding is not None and view.gate:
        wide = max(4, min(40, width - 36))
        full = view.outstanding >= view.gate
        bars.append(
            [
                ("outstanding  ", "dim"),
                *level_bar(view.outstanding, view.gate, wide, glyphs, "warn" if full else "level"),
                (f"  {count(view.outstanding)} of {count(view.gate)}{' groups' if width >= ROOMY else ''}", ""),
            ]
        )
    unbarred: tuple[str, str, Style] = ("outstanding", count(view.outstanding), "")
    return facts(
        [
            ("trained", exact(view.trained), ""),
            ("filtered", exact(view.filtered), ""),
            ("quarantined", exact(view.quarantined), "bad" if view.quarantined else ""),
            *([] if bars else [unbarred]),
            ("in the buffer", count(view.buffered), ""),
            ("a step takes", f"{view.groups_per_step} groups", ""),
        ],
        bars,
        width,
        "dataloader/0",
    )


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


def panes_of(document: Document | None) -> tuple[PaneName, ...]:
    """Panes that this run has something for."""
    return PANES if document is not None and document.episodes is not None else PANES[: PANES.index("episodes")]


def pane(name: PaneName, document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """A pane at a width."""
    return _DRAWN[name](document, choice, width, glyphs)


def title(name: PaneName, document: Document, choice: Choice) -> str:
    """The title of a pane, with what is filtered."""
    if name == "events" and choice.level != "info":
        return f"events: {choice.level}s" if choice.level == "error" else "events: warnings, errors"
    if name == "rollouters":
        return f"rollouters {sum(is_there(row.condition) for row in document.rollouters)}/{len(document.rollouters)}"
    if name == "episodes" and document.episodes is not None:
        there = sum(is_there(row.condition) for row in document.episodes.hosts)
        return f"episodes {there}/{len(document.episodes.hosts)}"
    return name


MOST_SHOWN: dict[PaneName, int] = {"events": 20, "weights": 8}
"""Entries of panes that may have many."""


def page(document: Document, width: int, glyphs: Glyphs, *, whole: bool = False) -> str:
    """All panes, one below the other: the newest of events and updates, and events as a ``whole`` if that is asked for,
    however wide they are."""
    choice, empty = Choice(), Text()
    lines = [*header(document, width, glyphs), empty, *pipeline(document, width, glyphs)]
    for name in panes_of(document):
        longest = max((len(event.text) for event in document.events), default=0) if whole else 0
        wide = width + longest if name == "events" else width
        drawn = pane(name, document, choice, wide, glyphs).lines(wide, glyphs, MOST_SHOWN.get(name))
        lines += [empty, Text(title(name, document, choice).upper()), *drawn]
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)

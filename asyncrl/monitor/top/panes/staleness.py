"""Versions between sampling and training. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from asyncrl.monitor.numbers import count, fixed, percent
from asyncrl.monitor.top.bars import level_bar
from asyncrl.monitor.top.document import Document, StalenessView
from asyncrl.monitor.top.panes.base import Choice, Pane
from asyncrl.monitor.top.text import Glyphs, Line, Style, joined

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
    return Pane([head, titles], [""] * len(lines), lambda number: lines[number], "learner/0")


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

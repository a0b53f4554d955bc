"""The reward pool. Pure."""

from __future__ import annotations

from asyncrl.monitor.bottleneck import by_kind
from asyncrl.monitor.numbers import count, duration, percent, rate
from asyncrl.monitor.top.bars import state_bar
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import Choice, Pane, facts
from asyncrl.monitor.top.text import Glyphs


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

"""The panes as styled lines, drawn from the Document alone: one module each. Pure.

A pane has lines that stay on top and entries below them, which are drawn when they are seen.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import Choice, Pane, PaneName, is_there
from asyncrl.monitor.top.panes.episodes import episodes
from asyncrl.monitor.top.panes.events import events
from asyncrl.monitor.top.panes.learner import learner
from asyncrl.monitor.top.panes.ledger import ledger
from asyncrl.monitor.top.panes.reward import reward
from asyncrl.monitor.top.panes.rollouters import rollouters
from asyncrl.monitor.top.panes.staleness import staleness
from asyncrl.monitor.top.panes.weights import weights
from asyncrl.monitor.top.text import Glyphs

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

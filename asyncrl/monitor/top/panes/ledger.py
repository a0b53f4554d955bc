"""The ledger: prompt groups by what became of them. Pure."""

from __future__ import annotations

from asyncrl.monitor.numbers import count, exact
from asyncrl.monitor.top.bars import level_bar
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import Choice, Pane, facts
from asyncrl.monitor.top.text import Glyphs, Line, Style

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

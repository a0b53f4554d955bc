"""The whole screen as plain text, for ``--once`` and where there is no terminal. Pure."""

from __future__ import annotations

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes import pane, panes_of, title
from asyncrl.monitor.top.panes.base import Choice, PaneName
from asyncrl.monitor.top.pipeline import header, pipeline
from asyncrl.monitor.top.text import Glyphs, Line, plain, to_ascii

MOST_SHOWN: dict[PaneName, int] = {"events": 20, "weights": 8}
"""Entries of panes that may have many."""


def page(document: Document, width: int, glyphs: Glyphs, *, ascii_only: bool = False, whole: bool = False) -> str:
    """All panes, one below the other: the newest of events and updates, and events as a ``whole`` if that is asked for,
    however wide they are."""
    choice = Choice()
    lines: list[Line] = [*header(document, width, glyphs), [], *pipeline(document, width, glyphs)]
    for name in panes_of(document):
        longest = max((len(event.text) for event in document.events), default=0) if whole else 0
        drawn = pane(name, document, choice, width + longest if name == "events" else width, glyphs)
        lines += [[], [(title(name, document, choice).upper(), "bold")], *drawn.lines(MOST_SHOWN.get(name))]
    text = "\n".join(plain(line).rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii_only else text

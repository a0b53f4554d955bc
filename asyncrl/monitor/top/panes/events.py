"""Events, the newest first. Pure."""

from __future__ import annotations

import time

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import LEVELS, Choice, Pane, matches
from asyncrl.monitor.top.table import Column, Row, Table
from asyncrl.monitor.top.text import Glyphs, Style
from asyncrl.snapshot import Event

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
    titles, line = Table(EVENTS, rows).laid(width)
    return Pane([titles], [row.key for row in rows], line)


def _is_wanted(event: Event, choice: Choice) -> bool:
    level = LEVELS.index(event.level) if event.level in LEVELS else len(LEVELS)
    return level >= LEVELS.index(choice.level) and matches(choice, event.actor, event.text, event.level)

"""Parts of all panes: the lines that are drawn, the choice of the user, and the words for an actor's state. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.monitor.bottleneck import kind_of
from asyncrl.monitor.top.text import Line, Span, Style, columns

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events", "episodes"]
LEVELS = ("info", "warning", "error")
BAR = 8
"""Cells of a bar in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice of the user: the order, the filter and the level of events."""

    sort: str = "host"
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines of a pane; ``line`` gives entry ``i``, ``keys[i]`` is what it is about: an actor, or empty."""

    head: list[Line]
    keys: Sequence[str] = ()
    line: Callable[[int], Line] = field(default=lambda _number: [])
    about: str = ""
    """Actor that the pane is about as a whole."""

    def lines(self, most: int | None = None) -> list[Line]:
        """All lines of the pane, or those of no more than so many entries."""
        return [*self.head, *(self.line(number) for number in range(len(self.keys[:most])))]


def matches(choice: Choice, *texts: str) -> bool:
    """Whether one of the texts holds the needle."""
    needle = choice.needle.lower()
    return not needle or any(needle in text.lower() for text in texts)


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can do anything."""
    return condition in ("ready", "starting", "silent")


def is_amiss(condition: str) -> bool:
    """Whether an actor should be otherwise."""
    return condition in ("condemned", "dead", "lost", "aside")


def said_state(condition: str, state: str, awaiting: str) -> Span:
    """Words for what an actor does, with their style."""
    if condition in ("ready", "starting") and state:
        style: Style = {"wait": "dim", "start": "start", "weights": "weights", "upkeep": "upkeep"}.get(  # type: ignore[assignment]
            kind_of(state), ""
        )
        whom = awaiting.removeprefix("weights ") if kind_of(state) in ("wait", "weights") else ""
        return f"{state} {whom}".rstrip(), style
    return condition, "start" if condition in ("starting", "absent") else "bad" if is_amiss(condition) else "dim"


def facts(known: Sequence[tuple[str, str, Style]], bars: Sequence[Line], width: int, about: str) -> Pane:
    """Names and values in as many columns as there is room for, filled downwards, below ``bars``."""
    lines = [*bars, *columns(known, width, most=3)]
    return Pane([], [""] * len(lines), lambda number: lines[number], about)

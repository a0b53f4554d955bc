"""The lines around the panes: tabs, the time bar of a replay, and the foot. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.monitor.client import Away
from asyncrl.monitor.numbers import duration
from asyncrl.monitor.top.bars import level_bar
from asyncrl.monitor.top.panes.base import LEVELS, Choice, PaneName
from asyncrl.monitor.top.replay import Replay
from asyncrl.monitor.top.text import Glyphs, Line, length

KEYS = ("? help", "q quit", "s sort", "/ filter", "space {space}")
"""Hints of the keys, as many as there is room for."""


def tabs(panes: Sequence[PaneName], seen: PaneName, width: int) -> Line:
    """The panes of the run, of which one is seen; where there is no room for all of their names, that one's."""
    line: Line = []
    for number, name in enumerate(panes, 1):
        line += [(f"{number} {name}", "chosen" if name == seen else "dim"), ("  ", "")]
    if length(line[:-1]) > width:
        line = []
        for number, name in enumerate(panes, 1):
            line += [(f"{number} {name}", "chosen") if name == seen else (f"{number}", "dim"), ("  ", "")]
    return line[:-1]


def time_bar(replay: Replay, width: int, glyphs: Glyphs) -> Line:
    """Place of the viewer in a recording, as a bar."""
    past, whole = replay.position - replay.begin, replay.end - replay.begin
    left = f"{time.strftime('%H:%M:%S', time.localtime(replay.position))}  {duration(past)} of {duration(whole)}  "
    right = f"  ×{replay.speed:g} {'playing' if replay.playing else 'paused'}"
    bar = level_bar(past, whole, max(4, width - len(left) - len(right)), glyphs)
    return [(left, ""), *bar, (right, "dim")]


def status(*, note: str, frozen: bool, replay: Replay | None, over: str, away: Away | None, attached: bool) -> Line:
    """Status of the picture that is seen: a note, frozen, a replay, over, away, live or attaching."""
    if note:
        return [("frozen  ", "bad"), (note, "warn")] if frozen else [(note, "warn")]
    if frozen:
        return [("frozen, space goes on", "warn")]
    said: Line
    if replay is not None:
        said = [("replay", "level")]
        if replay.note:
            said.append((f"  {replay.note}", "warn"))
        elif replay.at_end and replay.lives:
            said.append(("  up to here; the run goes on", "warn"))
        return said
    if over:
        return [(over, "warn")]
    if away is not None:
        said = [(f"no answer for {duration(away.seconds)}", "bad"), (", asked on", "dim")]
        return [*said, (f": {away.reason}", "dim")] if away.reason else said
    return [("live", "good")] if attached else [("attaching", "start")]


def foot(status: Line, choice: Choice, width: int, *, replay: bool) -> Line:
    """The status, what is filtered, and the keys where there is room for them."""
    chosen = [f"filter: {choice.needle}"] if choice.needle else []
    if choice.level != LEVELS[0]:
        chosen.append(f"events: {choice.level}")
    line = [*status, (f"   {'   '.join(chosen)}", "warn")] if chosen else list(status)
    keys, room = [key.format(space="play" if replay else "freeze") for key in KEYS], width - length(line)
    while keys and len("  ".join(keys)) + 2 > room:
        keys.pop()
    return [*line, (f"{'  '.join(keys):>{room}}", "dim")] if keys else line

"""Places of everything on a terminal, by its size; and the text on the keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from asyncrl.monitor.bottleneck import Kind
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import PaneName
from asyncrl.monitor.top.panes.staleness import buckets
from asyncrl.monitor.top.text import wrapped

WIDE = (150, 40)
"""Width and height from which on all panes are seen at once."""
LEAST = (60, 16)
"""Width and height below which there is no room for anything."""
MOST_RANKS, MOST_BUCKETS = 6, 12
"""Ranks and buckets that are seen at once where all panes are."""
MOST_EPISODES = 12
"""Stages and hosts of episodes that are seen at once where all panes are."""
RANKS_FRAME, BUCKETS_FRAME, EPISODES_FRAME = 6, 4, 7
"""Rows of borders and heads."""
TAKEN = 27
"""Rows that learner and staleness leave to others: 11 around the panes, 10 for reward and ledger, 6 for weights."""
Room = Literal["small", "narrow", "wide"]

CSS = """
Screen { background: #1c2029; color: #d5dae5; }
#header { height: 2; background: #252b37; padding: 0 1; }
#pipeline { height: 8; padding: 1 1 0 1; }
#time { height: 1; padding: 0 1; display: none; }
#tabs { height: 1; padding: 0 1; background: #252b37; }
#foot { height: 1; padding: 0 1; background: #252b37; }
#small { height: 1fr; padding: 0 1; display: none; }
#filter { height: 1; border: none; padding: 0 1; display: none; background: #313a4b; }
#body { height: 1fr; }
PaneView { padding: 0 1; background: #1c2029; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
    scrollbar-color: #3d475c; scrollbar-background: #1c2029; overflow-x: hidden; }
.narrow #left, .narrow #right, .narrow #pair, .narrow .pane { display: none; height: 1fr; width: 1fr; }
.narrow #left.seen, .narrow #right.seen, .narrow #pair.seen, .narrow .pane.seen { display: block; }
.replay #time { display: block; }
.small > *, .small #time { display: none; }
.small #small { display: block; }
.wide #tabs { display: none; }
.wide #left { width: 1fr; }
.wide #right { width: 48%; min-width: 76; max-width: 96; }
.wide .pane { border: round #3d475c; border-title-color: #aab3c5; }
.wide .pane:focus { border: round #7aa2c4; border-title-color: #ffffff; }
.wide #rollouters { height: 2fr; }
.wide #events { height: 1fr; }
.wide .pane.absent { display: none; }
.wide #weights { height: 1fr; }
.wide #pair { height: 10; }
.wide #reward, .wide #ledger { width: 1fr; height: 1fr; }
"""

HELP_WIDTH, HELP_LEFT = 72, 39
HELP = """\
 who waits on whom
   The stage marked with a diamond sets the pace; the line below the
   pipeline says why. Bars split all time by what it was spent on:
   {work} work   {weights} weights   {upkeep} checkpoints   {start} starting   {wait} waiting

 1 … 8, tab     panes\ts   sort by the next column
 ↑ ↓ enter      an actor in detail,\tr   the other way round
                n p: the next ones\t/   filter, esc shows all again
 space          freeze, go on\tt   have a trace written
 l              level of events\tq   quit; the run does not notice

 in a replay
 ← →            one snapshot\t< >  a twentieth of it
 space          play, stop\t- +  slower, faster

 flight: trajectories in a rollouter\twait: of these not in the engine
 v, lag: weights served, and how many versions behind
 rst: restarts of process and engine\toldest: age of a trajectory"""

TOO_SMALL = """\
needs {width}×{height}, better 80×24:
this terminal is {columns}×{rows}. Make it larger, or
print everything once: asyncrl-top RUN --once
q quits; the run does not notice"""


def room(width: int, height: int) -> Room:
    """Room on a terminal of this size."""
    if width < LEAST[0] or height < LEAST[1]:
        return "small"
    return "wide" if width >= WIDE[0] and height >= WIDE[1] else "narrow"


def heights(document: Document, room: Room, rows: int) -> dict[PaneName, int | str]:
    """Heights of the panes that vary with what is in them, where all panes are seen."""
    if room != "wide":
        return {"learner": "1fr", "staleness": "1fr", "episodes": "1fr"}
    free = rows - TAKEN - RANKS_FRAME - BUCKETS_FRAME
    wanted = min(MOST_BUCKETS, buckets(document.staleness))
    # Half of the room, and what the other does not need.
    ranks = max(1, min(MOST_RANKS, len(document.ranks), max(free // 2, free - wanted)))
    found: dict[PaneName, int | str] = {
        "learner": RANKS_FRAME + ranks,
        "staleness": BUCKETS_FRAME + min(wanted, free - ranks),
    }
    if document.episodes is not None:
        entries = len(document.episodes.stages) + len(document.episodes.hosts)
        found["episodes"] = EPISODES_FRAME + min(entries, MOST_EPISODES, rows // 3 - EPISODES_FRAME)
    return found


def help_lines(width: int, kinds: Mapping[Kind, str]) -> list[str]:
    """Text on the keys; in one column where there is no room for two."""
    text = HELP.format_map({str(kind): glyph for kind, glyph in kinds.items()})
    if width >= HELP_WIDTH:
        return [
            f"{left:<{HELP_LEFT}}{right}" for left, _, right in (line.partition("\t") for line in text.splitlines())
        ]
    found: list[str] = []
    for part in text.split("\n\n"):
        lines = [line.partition("\t") for line in part.splitlines()]
        both = [*(left for left, _, _ in lines), *(f" {right}" for _, _, right in lines if right)]
        found += [*(each for line in both for each in wrapped(line, width)), ""]
    return found[:-1]

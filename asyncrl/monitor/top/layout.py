"""Where everything stands on a terminal, by its size; and what the keys are. Pure."""

from __future__ import annotations

from typing import Literal

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import PaneName
from asyncrl.monitor.top.panes.staleness import buckets

WIDE = (150, 40)
"""From this width and height on all panes are seen at once."""
LEAST = (60, 16)
"""Below this there is no room for anything."""
MOST_RANKS, MOST_BUCKETS = 6, 12
"""Seen at once where all panes are."""
RANKS_FRAME, BUCKETS_FRAME = 5, 4
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
.wide #weights { height: 1fr; }
.wide #pair { height: 10; }
.wide #reward, .wide #ledger { width: 1fr; height: 1fr; }
"""

HELP = """\
 who waits on whom
   The stage marked with a diamond sets the pace; the line below the
   pipeline says why. Bars split all time by what it was spent on:
   {work} work   {weights} weights   {upkeep} checkpoints   {start} starting   {wait} waiting

 1 … 7, tab     panes                  s   sort by the next column
 ↑ ↓ enter      an actor in detail,    r   the other way round
                n p: the next ones     /   filter, esc shows all again
 space          freeze, go on          t   have a trace written
 l              level of events        q   quit; the run does not notice

 in a replay
 ← →            one snapshot           < >  a twentieth of it
 space          play, stop             - +  slower, faster

 flight: trajectories in a rollouter   wait: of these not in the engine
 v, lag: weights served, and how many versions behind
 rst: restarts of process and engine   oldest: age of a trajectory"""

TOO_SMALL = """\
asyncrl-top wants 80×24, and at least {width}×{height}:
this terminal is {columns}×{rows}. Make it larger, or
print everything once: asyncrl-top RUN --once
q quits; the run does not notice"""


def room(width: int, height: int) -> Room:
    """What there is room for."""
    if width < LEAST[0] or height < LEAST[1]:
        return "small"
    return "wide" if width >= WIDE[0] and height >= WIDE[1] else "narrow"


def heights(document: Document, room: Room, rows: int) -> dict[PaneName, int | str]:
    """Of the panes whose height depends on what is in them, where all panes are seen."""
    if room != "wide":
        return {"learner": "1fr", "staleness": "1fr"}
    free = rows - TAKEN
    ranks = max(1, min(MOST_RANKS, len(document.ranks), free // 2 - RANKS_FRAME))
    shown = min(MOST_BUCKETS, buckets(document.staleness), free - RANKS_FRAME - ranks - BUCKETS_FRAME)
    return {"learner": RANKS_FRAME + ranks, "staleness": BUCKETS_FRAME + shown}

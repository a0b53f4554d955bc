"""Columns of the tables of rollouters, ranks, weight updates, events and hosts of episodes. Pure."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.text.numbers import ABSENT, count, duration, fixed, percent, size
from asyncrl.top.drawing.layout import Column, number
from asyncrl.top.drawing.text import Span, Style, state_bar, warned
from asyncrl.top.figures.bottleneck import by_kind, kind_of

BAR = 8
"""Cells of a bar in a table."""
LEVEL_STYLES: dict[str, Style] = {"info": "dim", "warning": "warn", "error": "bad", "critical": "bad"}
EVENT_STYLES: dict[str, Style] = LEVEL_STYLES | {"info": ""}


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can do anything."""
    return condition in ("ready", "starting", "silent")


def is_amiss(condition: str) -> bool:
    """Whether an actor should be otherwise."""
    return condition in ("condemned", "dead", "lost", "aside")


def said_state(condition: str, state: str, awaiting: str) -> Span:
    """Words for what an actor does, with their style."""
    if condition in ("ready", "starting") and state:
        kind = kind_of(state)
        styles: dict[str, Style] = {"wait": "dim", "start": "start", "weights": "weights", "upkeep": "upkeep"}
        whom = awaiting.removeprefix("weights ") if kind in ("wait", "weights") else ""
        return f"{state} {whom}".rstrip(), styles.get(kind, "")
    return condition, "start" if condition in ("starting", "absent") else "bad" if is_amiss(condition) else "dim"


def _name(entry: Any, short: str = "") -> Span:
    """An actor's name; one that begins with ``short`` has its first letter alone."""
    name = entry.name.replace(short, f"{short[0]}/") if short else entry.name
    return name, "bad" if is_amiss(entry.condition) else ""


SHORT = "rollouter/"
ROLLOUTERS = (
    Column("rollouter", lambda row, _: _name(row, SHORT), 9, key="name"),
    Column("host", lambda row, _: (row.host, "dim"), drop=7, key="host", most=16),
    Column("state", lambda row, _: said_state(row.condition, row.state, row.awaiting), 10, key="state", most=15),
    Column("time", lambda row, glyphs: state_bar(by_kind(row.states), BAR, glyphs), BAR, 3),
    number("flight", lambda row: count(row.in_flight), 6, key="in_flight"),
    number("wait", lambda row: count(row.waiting), 4, 5, "waiting"),
    number("most", lambda row: (count(row.concurrency), "dim"), 4, 7, "concurrency"),
    number("tok/s", lambda row: count(row.tokens_per_s), 5, key="tokens_per_s"),
    number("KV", lambda row: (percent(row.kv_use), warned((row.kv_use or 0.0) > 0.95)), 4, 4, "kv_use"),
    number("v", lambda row: count(row.version), 3, key="version"),
    number("lag", lambda row: (count(row.lag), warned((row.lag or 0) > 1)), 3, key="lag"),
    number("stall", lambda row: duration(row.stall_s), 6, 6, "stall_s", spare=True),
    number("drift", lambda row: (fixed(row.drift, 3), warned(row.drift_warnings)), 6, 5, "drift", spare=True),
    number(
        "worst",
        lambda row: (fixed(row.drift_largest, 3), warned(row.drift_warnings, "dim")),
        *(6, 8, "drift_largest"),
        spare=True,
    ),
    number("rst", lambda row: (count(row.restarts), warned(row.restarts, "dim")), 3, 2, "restarts"),
    number("oldest", lambda row: duration(row.oldest_s), 6, 1, "oldest_s"),
)
RANKS = (
    Column("rank", lambda row, _: _name(row), 9),
    Column("host", lambda row, _: (row.host, "dim"), drop=4, most=16),
    Column("state", lambda row, _: said_state(row.condition, row.state, row.awaiting), 14, most=24),
    Column("time", lambda row, glyphs: state_bar(by_kind(row.states), BAR, glyphs), BAR),
    number("memory", lambda row: size(row.rss_bytes), 7),
    number(
        "GPU memory",
        lambda row: ABSENT if row.gpu_bytes is None else f"{size(row.gpu_bytes)}/{size(row.gpu_total_bytes)}",
        *(10, 2),
        spare=True,
    ),
)


UPDATES = (
    number("v", lambda update: count(update.version), 4),
    Column("replica", lambda update, _: update.replica, 9, most=14),
    Column("by", lambda update, _: (update.transport, "dim"), 6, 3),
    number("stage", lambda update: duration(update.stage_s), 6),
    number("pause", lambda update: duration(update.pause_s), 6),
    number("load", lambda update: duration(update.load_s), 6),
    number("stall", lambda update: duration(update.stall_s), 6),
    number("bytes", lambda update: size(update.bytes), 7),
    number("read", lambda update: size(update.encoded_bytes), 7, 2),
)


EVENTS = (
    Column("time", lambda event, _: (time.strftime("%H:%M:%S", time.localtime(event.wall)), "dim"), 8),
    Column("level", lambda event, _: (event.level, LEVEL_STYLES.get(event.level, "")), 7, 1),
    Column("actor", lambda event, _: event.actor or "run", 9, most=18),
    Column(
        "event",
        lambda event, _: (" ".join(event.text.split()), EVENT_STYLES.get(event.level, "")),
        width=20,
        most=20,
    ),
)
DATE = Column("time", lambda event, _: (time.strftime("%m-%d %H:%M:%S", time.localtime(event.wall)), "dim"), 8)
HOSTS = (
    Column("played by", lambda row, _: _name(row, "episodes/"), 9),
    Column("host", lambda row, _: (row.host, "dim"), drop=3, most=16),
    Column("state", lambda row, _: said_state(row.condition, "", ""), 6, most=12),
    Column("time", lambda row, glyphs: state_bar(row.kinds, BAR, glyphs), BAR, 4),
    number("workers", lambda row: f"{row.workers or ABSENT}", drop=1),
    number("open", lambda row: count(row.open), 4),
    number("wait", lambda row: (count(row.waiting), warned(row.waiting)), 4, 2),
    number("played", lambda row: count(row.played)),
    number("failed", lambda row: (count(row.failed), "bad" if row.failed else "")),
    number("tools", lambda row: count(row.tool_calls), 5, 5),
    number("errors", lambda row: (count(row.tool_errors), warned(row.tool_errors)), drop=6),
    number("lost", lambda row: (count(row.lost_workers), warned(row.lost_workers)), drop=7),
    number("rst", lambda row: (str(row.restarts), warned(row.restarts, "dim")), 3, 8),
)

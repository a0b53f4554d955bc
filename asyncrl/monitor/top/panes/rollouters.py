"""The rollouters and their engines, by host. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from asyncrl.monitor.bottleneck import by_kind
from asyncrl.monitor.numbers import count, duration, fixed, percent
from asyncrl.monitor.rates import total
from asyncrl.monitor.top.bars import state_bar
from asyncrl.monitor.top.document import Document, RollouterRow
from asyncrl.monitor.top.panes.base import BAR, Choice, Pane, is_amiss, is_there, matches, said_state
from asyncrl.monitor.top.table import Cell, Column, Row, Table
from asyncrl.monitor.top.text import Glyphs, Style

ROLLOUTERS = (
    Column(title="rollouter", width=9, key="name"),
    Column(title="host", drop=7, most=16, key="host"),
    Column(title="state", width=10, most=15, key="state"),
    Column(title="time", width=BAR, drop=3),
    Column(title="flight", right=True, width=6, key="in_flight"),
    Column(title="wait", right=True, width=4, drop=5, key="waiting"),
    Column(title="most", right=True, width=4, drop=7, key="concurrency"),
    Column(title="tok/s", right=True, width=5, key="tokens_per_s"),
    Column(title="KV", right=True, width=4, drop=4, key="kv_use"),
    Column(title="v", right=True, width=3, key="version"),
    Column(title="lag", right=True, width=3, key="lag"),
    Column(title="stall", right=True, width=6, drop=6, spare=True, key="stall_s"),
    Column(title="drift", right=True, width=6, drop=5, spare=True, key="drift"),
    Column(title="worst", right=True, width=6, drop=8, spare=True, key="drift_largest"),
    Column(title="rst", right=True, width=3, drop=2, key="restarts"),
    Column(title="oldest", right=True, width=6, drop=1, key="oldest_s"),
)
WORDS = ("name", "host", "state")
"""Columns that are sorted upwards at first; numbers downwards."""
SORTS = tuple(column.key for column in ROLLOUTERS if column.key)


def rollouters(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """A row for each rollouter, by host where there are several."""
    chosen = [
        row
        for row in document.rollouters
        if matches(choice, row.name, _short(row.name), row.host, row.condition, row.state)
    ]
    rows: list[Row] = []
    by_host = choice.sort == "host"
    hosts = len({row.host for row in chosen})
    for host, found in groupby(_in_order(chosen, choice), key=lambda row: row.host if by_host else ""):
        group = list(found)
        if by_host and hosts > 1:
            rows.append(_host_row(host, group))
        rows += [_rollouter_row(row, glyphs) for row in group]
    table = Table(ROLLOUTERS, rows, choice.sort, descending=choice.descending)
    head, line = table.laid(width)
    if not rows:
        said = f"no rollouter matches {choice.needle}" if document.rollouters else "no rollouter is known so far"
        return Pane([head, [(said, "dim")]])
    return Pane([head], ["" if row.heading else row.key for row in rows], line)


def sorted_next(choice: Choice) -> Choice:
    """The choice, sorted by the next column: words from the first on, numbers from the largest."""
    sort = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
    return replace(choice, sort=sort, descending=sort not in WORDS)


def _short(name: str) -> str:
    return name.replace("rollouter/", "r/")


def _in_order(rows: Iterable[RollouterRow], choice: Choice) -> list[RollouterRow]:
    def key(row: RollouterRow) -> tuple[bool, float | str]:
        value = getattr(row, choice.sort)
        if choice.sort == "name":
            return False, 0.0
        return value is None, value if value is not None else 0.0

    known = sorted(rows, key=lambda row: int(row.name.partition("/")[2] or 0))
    if choice.sort == "name":
        return known[::-1] if choice.descending else known
    there = sorted((row for row in known if not key(row)[0]), key=lambda row: key(row)[1], reverse=choice.descending)
    return [*there, *(row for row in known if key(row)[0])]


def _rollouter_row(row: RollouterRow, glyphs: Glyphs) -> Row:
    state = said_state(row.condition, row.state, row.awaiting)
    lag: Style = "warn" if row.lag is not None and row.lag > 1 else ""
    return Row(
        row.name,
        (
            (_short(row.name), "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            state,
            state_bar(by_kind(row.states), BAR, glyphs),
            (count(row.in_flight), ""),
            (count(row.waiting), ""),
            (count(row.concurrency), "dim"),
            (count(row.tokens_per_s), ""),
            (percent(row.kv_use), "warn" if (row.kv_use or 0.0) > 0.95 else ""),
            (count(row.version), ""),
            (count(row.lag), lag),
            (duration(row.stall_s), ""),
            (fixed(row.drift, 3), "warn" if row.drift_warnings else ""),
            (fixed(row.drift_largest, 3), "warn" if row.drift_warnings else "dim"),
            (count(row.restarts), "warn" if row.restarts else "dim"),
            (duration(row.oldest_s), ""),
        ),
    )


def _host_row(host: str, rows: Sequence[RollouterRow]) -> Row:
    there = sum(is_there(row.condition) for row in rows)
    blank: Cell = ("", "")
    return Row(
        host,
        (
            (host or "host unknown", "bold"),
            blank,
            (f"{there} of {len(rows)}", "bad" if any(is_amiss(row.condition) for row in rows) else "dim"),
            blank,
            (count(total(row.in_flight for row in rows)), "bold"),
            (count(total(row.waiting for row in rows)), "bold"),
            (count(total(row.concurrency for row in rows)), "bold"),
            (count(total(row.tokens_per_s for row in rows)), "bold"),
            *([blank] * 8),
        ),
        heading=True,
    )

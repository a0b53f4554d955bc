"""The episodes by what they are at, and the hosts that play them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.monitor.numbers import ABSENT, count, duration, fixed, percent
from asyncrl.monitor.top.bars import level_bar, state_bar
from asyncrl.monitor.top.document import Document, EpisodeHostRow, EpisodeStageRow, EpisodesView
from asyncrl.monitor.top.panes.base import BAR, Choice, Pane, is_amiss, matches, said_state
from asyncrl.monitor.top.table import Column, Row, Table
from asyncrl.monitor.top.text import Glyphs, Line, Style, fit, fitting, joined

STAGES = (
    Column(title="stage", width=12, most=32),
    Column(title="open", right=True, width=5),
    Column(title="time", right=True, width=4),
    Column(title=""),
)
SHARE_BAR = 24
HOSTS = (
    Column(title="played by", width=9),
    Column(title="host", drop=3, most=16),
    Column(title="state", width=6, most=12),
    Column(title="time", width=BAR, drop=4),
    Column(title="workers", right=True, drop=1),
    Column(title="open", right=True, width=4),
    Column(title="wait", right=True, width=4, drop=2),
    Column(title="played", right=True),
    Column(title="failed", right=True),
    Column(title="tools", right=True, width=5, drop=5),
    Column(title="errors", right=True, drop=6),
    Column(title="lost", right=True, drop=7),
    Column(title="rst", right=True, width=3, drop=8),
)


def episodes(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Open episodes by stage, the ends of those before, and a row for each host."""
    view = document.episodes
    if view is None:
        return Pane([[("a prompt has one response: there are no episodes", "dim")]])
    entries: list[tuple[str, Line]] = []
    if view.stages:
        head, line = Table(STAGES, [_stage(row, glyphs) for row in view.stages]).laid(width)
        entries += [("", head), *(("", line(number)) for number in range(len(view.stages)))]
    rows = [_host(row, glyphs) for row in view.hosts if matches(choice, row.name, row.host, row.condition)]
    head, line = Table(HOSTS, rows).laid(width)
    entries += [("", head), *((row.key, line(number)) for number, row in enumerate(rows))]
    return Pane(_head(view, width), [key for key, _ in entries], lambda number: entries[number][1])


def summary(view: EpisodesView) -> str:
    """Numbers of open episodes, in all and by stage, the most first."""
    at = [f"{count(row.open)} {row.name}" for row in view.stages if row.open]
    return f"{count(view.open)} episodes" + (f": {', '.join(at)}" if at else "")


def _head(view: EpisodesView, width: int) -> list[Line]:
    oldest: Line = [("oldest ", "dim"), (duration(view.oldest_s if view.open else None), "")]
    cost: Style = "warn" if (view.cost_factor or 0.0) > 2 else ""
    p95 = view.turns_p95
    figures: list[Line] = [
        [("turns ", "dim"), (fixed(view.turns_mean, 1), "")],
        [("p95 ", "dim"), (ABSENT if p95 is None else f"≤ {p95:g}" if p95 < float("inf") else "many", "")],
        [("context ", "dim"), (f"{count(view.prompt_tokens_mean)} tokens", "")],
        [("cost ", "dim"), (fixed(view.cost_factor), cost)],
        [("prefilled again ", "dim"), (count(view.reprefill_tokens), "")],
        [("malformed calls ", "dim"), (count(view.malformed_calls), "warn" if view.malformed_calls else "")],
    ]
    ends: list[Line] = [
        [("ended ", "dim"), (_counts(view.ended), "")],
        [("failed ", "dim"), (_counts(view.failed), "bad" if view.failed else "")],
        [("forks ", "dim"), (_counts(view.forks), "")],
    ]
    return [
        fit(joined([oldest, [(summary(view), "bold")]]), width),
        fit(fitting(figures, width), width),
        fit(fitting(ends, width), width),
    ]


def _counts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _stage(row: EpisodeStageRow, glyphs: Glyphs) -> Row:
    bar = level_bar(row.share or 0.0, 1.0, SHARE_BAR, glyphs)
    return Row("", ((row.name, "bold" if row.open else "dim"), (count(row.open), ""), (percent(row.share), ""), bar))


def _host(row: EpisodeHostRow, glyphs: Glyphs) -> Row:
    return Row(
        row.name,
        (
            (row.name.replace("episodes/", "e/"), "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            said_state(row.condition, "", ""),
            state_bar(row.kinds, BAR, glyphs),
            (f"{row.workers}" if row.workers else ABSENT, ""),
            (count(row.open), ""),
            (count(row.waiting), "warn" if row.waiting else ""),
            (count(row.played), ""),
            (count(row.failed), "bad" if row.failed else ""),
            (count(row.tool_calls), ""),
            (count(row.tool_errors), "warn" if row.tool_errors else ""),
            (count(row.lost_workers), "warn" if row.lost_workers else ""),
            (str(row.restarts), "warn" if row.restarts else "dim"),
        ),
    )

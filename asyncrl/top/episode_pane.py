"""The pane of episodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.text.numbers import ABSENT, count, duration, fixed, percent
from asyncrl.top.drawing.columns import HOSTS
from asyncrl.top.drawing.layout import Choice, Pane, table_of
from asyncrl.top.drawing.text import Glyphs, Line, fitting, joined, level_bar, said, warned
from asyncrl.top.figures.document import Document, EpisodesView

STAGE_WIDTH = 32
SHARE_BAR = 24


def episodes(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Open episodes by stage, the ends of those before, and a row for each host."""
    view = document.episodes
    if view is None:
        return Pane([[("a prompt has one response: there are no episodes", "dim")]])
    hosts = [row for row in view.hosts if choice.matches(row.name, row.host, row.condition)]
    return Pane([*_episode_figures(view, width), *_stages(view, glyphs)], table_of(HOSTS, hosts, glyphs))


def _episode_figures(view: EpisodesView, width: int) -> list[Line]:
    at = ", ".join(f"{count(row.open)} {row.name}" for row in view.stages if row.open)
    p95 = view.turns_p95
    return [
        joined(
            [
                said("oldest", duration(view.oldest_s if view.open else None)),
                [(f"{count(view.open)} episodes" + (f": {at}" if at else ""), "bold")],
            ]
        ),
        fitting(
            [
                said("turns", fixed(view.turns_mean, 1)),
                said("p95", ABSENT if p95 is None else f"≤ {p95:g}" if p95 < float("inf") else "many"),
                said("context", f"{count(view.prompt_tokens_mean)} tokens"),
                said("cost", fixed(view.cost_factor), warned((view.cost_factor or 0.0) > 2)),
                said("prefilled again", count(view.reprefill_tokens)),
                said("malformed calls", count(view.malformed_calls), warned(view.malformed_calls)),
            ],
            width,
        ),
        fitting(
            [
                said("ended", _counts(view.ended)),
                said("failed", _counts(view.failed), "bad" if view.failed else ""),
                said("forks", _counts(view.forks)),
            ],
            width,
        ),
    ]


def _counts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _stages(view: EpisodesView, glyphs: Glyphs) -> list[Line]:
    """Titles, and a line for each stage: its open episodes, and its share of the time of those that have ended."""
    if not view.stages:
        return []
    wide = min(STAGE_WIDTH, max(12, *(len(row.name) for row in view.stages)))
    lines: list[Line] = [[(f"{'stage':<{wide}}   open  time", "dim")]]
    for each in view.stages:
        figures = f"  {count(each.open):>5}  {percent(each.share):>4}  "
        bar = level_bar(each.share or 0.0, 1.0, SHARE_BAR, glyphs)
        lines.append([(f"{each.name[:wide]:<{wide}}", "bold" if each.open else "dim"), (figures, ""), *bar])
    return lines

"""The learner's step, whether the policy learns, and the ranks. Pure."""

from __future__ import annotations

from asyncrl.monitor.bottleneck import by_kind
from asyncrl.monitor.numbers import count, duration, fixed, percent, size
from asyncrl.monitor.top.bars import state_bar
from asyncrl.monitor.top.document import Document, RankRow
from asyncrl.monitor.top.panes.base import BAR, Choice, Pane, is_amiss, matches, said_state
from asyncrl.monitor.top.table import Column, Row, Table
from asyncrl.monitor.top.text import Glyphs, Line, Style, fitting, joined

RANKS = (
    Column(title="rank", width=9),
    Column(title="host", drop=4, most=16),
    Column(title="state", width=14, most=24),
    Column(title="time", width=BAR),
    Column(title="memory", right=True, width=7),
    Column(title="GPU memory", right=True, width=10, drop=2, spare=True),
)


def learner(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """Phases of a step, figures of the newest one, and a row for each rank."""
    rows = [_rank_row(row, glyphs) for row in document.ranks if matches(choice, row.name, row.host, row.state)]
    titles, line = Table(RANKS, rows).laid(width)
    return Pane(
        [_step(document), _learning(document, width), _speed(document), titles],
        [row.key for row in rows],
        line,
        "learner/0",
    )


def _step(document: Document) -> Line:
    """Duration of a step, and of each of its phases."""
    seconds = {phase.name: phase.seconds for phase in document.phases}
    if not seconds:
        return [("only a first step is trained so far" if document.run.step else "no step is trained so far", "dim")]
    whole = seconds.pop("step", None)
    phases: list[Line] = [
        [(f"{name} ", "dim"), (duration(each), ""), (f" {percent(each / whole)}" if whole else "", "dim")]
        for name, each in seconds.items()
    ]
    return joined([[("step ", "dim"), (duration(whole), "bold")], *phases])


def _learning(document: Document, width: int) -> Line:
    """Figures of the newest step. A gradient or a learning rate of 0 stands out: nothing is learnt from it."""
    found = document.learning
    figures = {"loss": found.loss, "grad norm": found.grad_norm, "entropy": found.entropy, "KL": found.kl}
    figures["lr"] = found.lr
    styles: dict[str, Style] = {name: "bad" for name in ("grad norm", "lr") if figures[name] == 0}
    return fitting(
        [[(f"{name} ", "dim"), (fixed(value, 3), styles.get(name, ""))] for name, value in figures.items()], width
    )


def _speed(document: Document) -> Line:
    """Speed and reward. A step is of all ranks, and so are its tokens and its share of the peak."""
    first = document.ranks[0] if document.ranks else None
    parts: list[Line] = [
        [("trained tokens/s ", "dim"), (count(first.tokens_per_s if first is not None else None), "")],
    ]
    if first is not None and first.mfu is not None:
        parts.append([("MFU ", "dim"), (percent(first.mfu), "")])
    if (reward := document.learning.reward) is not None:
        spread = document.learning.reward_std
        parts.append(
            [
                ("reward ", "dim"),
                (fixed(reward, 3), ""),
                (f" ± {fixed(spread, 3)}" if spread is not None else "", "dim"),
            ]
        )
    if (engine_kl := document.learning.engine_kl) is not None:
        # A step without tokens of equal weights has none.
        parts.append([("engine KL ", "dim"), (fixed(engine_kl, 3), "")])
    return joined(parts)


def _rank_row(row: RankRow, glyphs: Glyphs) -> Row:
    gpu = (
        f"{size(row.gpu_bytes)}/{size(row.gpu_total_bytes)}"
        if row.gpu_bytes is not None and row.gpu_total_bytes is not None
        else count(None)
    )
    return Row(
        row.name,
        (
            (row.name, "bad" if is_amiss(row.condition) else ""),
            (row.host, "dim"),
            said_state(row.condition, row.state, row.awaiting),
            state_bar(by_kind(row.states), BAR, glyphs),
            (size(row.rss_bytes), ""),
            (gpu, ""),
        ),
    )

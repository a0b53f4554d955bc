"""The charts of a report, made with Plotly from the lines of metrics.jsonl and from recorded spans.

Whatever comes from the run, as the name of an evaluation, is text and never markup. Long runs are thinned: neighbours
are put together, by mean or by maximum, so that no curve has more than MOST_POINTS.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from asyncrl.monitor.metrics_line import Line, number_in
from asyncrl.monitor.utilisation import KINDS, Span

MOST_POINTS = 2000
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, TEAL, BROWN = (
    *("#3b6fb6", "#e08a2c", "#4f9d5d", "#c8504b", "#8566ad", "#9aa3ad", "#3aa3a0", "#8c6d4f"),
)
OTHERS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN, RED, GREY)
STATE_COLOURS = {
    **{"generating": GREEN, "training": GREEN, "scoring": GREEN},
    **{"waiting": GREY, "idle": GREY, "following": "#c3c9cf", "done": "#dfe3e7"},
    **{"starting": BROWN, "restarting": RED},
    **{"pausing": "#f0b26b", "paused": ORANGE, "loading": PURPLE, "probing": TEAL},
    **{"publishing": PURPLE, "checkpointing": BLUE, "exporting": TEAL},
}
STEP = "time/step_s"
PARTS = {"wait_for_groups": GREY, "train": GREEN, "publish": PURPLE, "other": BROWN}

Points = tuple[list[float], list[float]]


def text(value: object) -> str:
    """As Plotly, which knows some tags, is to be given what may hold any."""
    return html.escape(str(value))


def series(lines: Sequence[Line], key: str, *, by: str = "step", join: Callable[[list[float]], float] = max) -> Points:
    """The finite values of ``key``; None of those that are absent. Thinned by ``join``."""
    points = [(float(line[by]), y) for line in lines if (y := number_in(line, key)) is not None and by in line]
    width = math.ceil(len(points) / MOST_POINTS) or 1
    bins = [points[at : at + width] for at in range(0, len(points), width)]
    return [bin[-1][0] for bin in bins], [join([y for _, y in bin]) for bin in bins]


def mean(values: list[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def reward(train: Sequence[Line], evals: Sequence[Line]) -> go.Figure | None:
    """Of training, and each evaluation."""
    figure = _figure("reward")
    _line(figure, train, "reward/mean", "all scored", BLUE)
    _line(figure, train, "reward/trained_mean", "trained", TEAL, dash="dot")
    keys = sorted({key for line in evals for key in line if key.startswith("eval/") and key.endswith("/mean")})
    for index, key in enumerate(keys):
        x, y = series(evals, key, join=mean)
        colour = OTHERS[(index + 1) % len(OTHERS)]
        figure.add_scatter(x=x, y=y, name=text(key.removesuffix("/mean")), mode="lines+markers", line={"color": colour})
    return _unless_empty(figure)


def staleness(train: Sequence[Line]) -> go.Figure | None:
    """Of the trained tokens, in versions, and what was allowed."""
    figure = _figure("versions")
    _line(figure, train, "staleness/token_mean", "mean", BLUE)
    _line(figure, train, "staleness/token_max", "max", ORANGE, join=max)
    _line(figure, train, "staleness/limit", "limit", RED, dash="dash")
    return _unless_empty(figure)


def utilisation(found: Sequence[Span]) -> go.Figure | None:
    """Shares of states, stacked, for each kind of resource."""
    kinds = [kind for kind in KINDS if any(kind in span.shares for span in found)]
    if not kinds:
        return None
    figure = make_subplots(
        rows=len(kinds), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[KINDS[k] for k in kinds]
    )
    began = [_moment(span.began) for span in found]
    width = [1000 * (span.ended - span.began) for span in found]
    shown: set[str] = set()
    for row, kind in enumerate(kinds, 1):
        states = {state for span in found for state in span.shares.get(kind, {})}
        for state in sorted(states, key=_state_order):
            figure.add_bar(
                x=began,
                y=[span.shares.get(kind, {}).get(state, 0.0) for span in found],
                width=width,
                offset=0,
                name=text(state),
                legendgroup=state,
                showlegend=state not in shown,
                marker={"color": STATE_COLOURS.get(state, BROWN), "line": {"width": 0}},
                hovertemplate="%{y:.1%}<extra>%{fullData.name}</extra>",
                row=row,
                col=1,
            )
            shown.add(state)
        figure.update_yaxes(range=[0, 1], tickformat=".0%", row=row, col=1)
    figure.update_layout(barmode="stack", bargap=0)
    _style(figure, height=140 + 190 * len(kinds), titled=True)
    return figure


def step_breakdown(train: Sequence[Line]) -> go.Figure | None:
    """Where the seconds of a step went."""
    figure = _figure("seconds")
    rows = []
    for line in train:
        if (step_s := number_in(line, STEP)) is not None:
            parts = {name: number_in(line, f"time/{name}_s") or 0.0 for name in PARTS if name != "other"}
            rows.append({"step": line["step"], **parts, "other": max(0.0, step_s - sum(parts.values()))})
    for name, colour in PARTS.items():
        x, y = series(rows, name, join=mean)
        if any(y):
            figure.add_bar(x=x, y=y, name=name.replace("_", " "), marker={"color": colour, "line": {"width": 0}})
    figure.update_layout(barmode="stack", bargap=0)
    return _unless_empty(figure)


def weight_stall(train: Sequence[Line], updates: Sequence[Line]) -> go.Figure | None:
    """Generation time that weight updates cost: each update of a replica, and all of a step together."""
    figure = make_subplots(
        *(1, 2), subplot_titles=["each update, by weights version", "all replicas together, by step"]
    )
    transports = sorted({str(line.get("weights/transport", "")) for line in updates})
    for index, transport in enumerate(transports):
        chosen = [line for line in updates if str(line.get("weights/transport", "")) == transport]
        chosen.sort(key=lambda line: line.get("weights/version", 0))
        x, y = series(chosen, "weights/stall_s", by="weights/version")
        colour = OTHERS[index % len(OTHERS)]
        figure.add_scatter(
            x=x, y=y, name=text(transport or "update"), mode="markers", marker={"size": 4, "color": colour}
        )
    x, y = series(train, "weights/stall_s", join=mean)
    if x:
        figure.add_scatter(x=x, y=y, name="sum of a step", mode="lines", line={"color": PURPLE}, row=1, col=2)
    _style(figure, titled=True)
    figure.update_yaxes(title="seconds", rangemode="tozero")
    return _unless_empty(figure)


def lengths(train: Sequence[Line]) -> go.Figure | None:
    """Of responses."""
    figure = _figure("tokens")
    _line(figure, train, "rollout/length_mean", "mean", BLUE)
    _line(figure, train, "rollout/length_p95", "95th percentile", ORANGE)
    _line(figure, train, "rollout/granted_length_mean", "mean of all delivered", GREY, dash="dot")
    return _unless_empty(figure)


def tokens(train: Sequence[Line]) -> go.Figure | None:
    """Sampled a second, by all engines."""
    figure = _figure("tokens/s")
    _line(figure, train, "rollout/tokens_per_s", "sampled", GREEN)
    return _unless_empty(figure)


def ledger(train: Sequence[Line]) -> go.Figure | None:
    """What became of the prompt groups, since the start of the run."""
    figure = _figure("groups")
    for key, colour in (("trained", GREEN), ("filtered", GREY), ("quarantined", RED)):
        x, y = series(train, f"ledger/{key}")
        if any(y):
            figure.add_scatter(x=x, y=y, name=key, mode="lines", stackgroup="groups", line={"color": colour})
    return _unless_empty(figure)


def _line(
    figure: go.Figure,
    lines: Sequence[Line],
    key: str,
    name: str,
    colour: str,
    *,
    dash: str = "solid",
    join: Callable[[list[float]], float] = mean,
) -> None:
    x, y = series(lines, key, join=join)
    if x:
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": colour, "dash": dash})


def _figure(unit: str) -> go.Figure:
    figure = go.Figure()
    _style(figure)
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title="step")
    return figure


def _style(figure: go.Figure, height: int = 340, *, titled: bool = False) -> None:
    """``titled``: there are titles of its parts, and the legend goes above them."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 20, "t": 80 if titled else 30, "b": 45},
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#333"},
        legend={
            "orientation": "h",
            "y": 1 + 28 / (height - 125) if titled else 1.02,
            "yanchor": "bottom",
            # On the right are the buttons.
            "x": 0,
            "xanchor": "left",
        },
        hovermode="x unified",
        showlegend=True,
    )
    figure.update_xaxes(showgrid=False, linecolor="#ccc", ticks="outside", tickcolor="#ccc")
    figure.update_yaxes(gridcolor="#eee", zerolinecolor="#ccc")


def _unless_empty(figure: go.Figure) -> go.Figure | None:
    return figure if figure.data else None


def _state_order(state: str) -> tuple[int, str]:
    known = list(STATE_COLOURS)
    return (known.index(state) if state in known else len(known)), state


def _moment(wall: float) -> datetime:
    # Without a time zone, which a browser would apply.
    return datetime.fromtimestamp(wall, UTC).replace(tzinfo=None)

"""The charts of a report, made from the lines of metrics.jsonl and from recorded spans. Pure.

Each chart function returns panels; an empty list without data. In long runs neighbouring points are joined, by mean or
by maximum, so no curve over steps or versions has more than MOST_POINTS. A *span* is the time between two neighbouring
snapshots. In each span the shares of the states of all resources of a kind add up to 1. Spans across two attempts of a
run are left out, because nothing ran between the attempts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, pairwise

from asyncrl.messages.monitor import ActorView, Interval, Resource, Shares, Snapshot
from asyncrl.observe.metrics_line import (
    Line,
    component_numbers,
    eval_names,
    eval_numbers,
    is_eval_mean,
    number_in,
    pass_at_numbers,
    served_versions,
    versions_in_words,
)
from asyncrl.observe.report.panels import Curve, Panel

MOST_POINTS = 600
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, TEAL, BROWN = (
    *("#3b6fb6", "#e08a2c", "#4f9d5d", "#c8504b", "#8566ad", "#9aa3ad", "#3aa3a0", "#8c6d4f"),
)
OTHERS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN, RED, GREY)
"""Colours of curves that have no colour of their own, in turn."""
STATE_COLOURS = {
    **{"generating": GREEN, "training": GREEN, "scoring": GREEN, "playing": GREEN},
    **{"waiting": GREY, "idle": GREY, "following": "#c3c9cf", "done": "#dfe3e7"},
    **{"starting": BROWN, "restarting": RED, "asleep": "#dfe3e7", "waking": BROWN},
    **{"pausing": "#f0b26b", "paused": ORANGE, "loading": PURPLE, "probing": TEAL},
    **{"publishing": PURPLE, "checkpointing": BLUE, "exporting": TEAL},
}
STEP = "time/step_s"
PARTS = {"wait_for_groups": GREY, "train": GREEN, "publish": PURPLE, "other": BROWN}

SHARE = "rollout/episode_share/"
STAGES = {
    **{"engine": GREEN, "queue": GREY, "paused": ORANGE, "tool": BLUE, "user": PURPLE},
    **{"start": BROWN, "close": RED, "score": TEAL},
}
"""Colours of the stages of episodes."""

Points = tuple[list[float], list[float]]


def series(lines: Sequence[Line], key: str, *, by: str = "step", join: Callable[[list[float]], float] = max) -> Points:
    """The points (x, y) of a curve: finite values of ``key`` over those of ``by``, thinned to MOST_POINTS.

    ``join`` makes one y of the neighbouring ones that become one point.
    """
    return _thinned(
        [(float(line[by]), y) for line in lines if (y := number_in(line, key)) is not None and by in line], join
    )


def _thinned(points: Sequence[tuple[float, float]], join: Callable[[list[float]], float]) -> Points:
    """Join neighbouring points until MOST_POINTS are left: each has the last x of its group and the joined y."""
    width = math.ceil(len(points) / MOST_POINTS) or 1
    bins = [points[at : at + width] for at in range(0, len(points), width)]
    return [bin[-1][0] for bin in bins], [join([y for _, y in bin]) for bin in bins]


def mean(values: list[float]) -> float:
    """Mean of at least one value."""
    return math.fsum(value / len(values) for value in values)


def reward(train: Sequence[Line], evals: Sequence[Line]) -> list[Panel]:
    """Chart the reward in training and in each evaluation.

    An evaluation is drawn at the training step that made the newest of the weights that it used.
    """
    curves = [
        *_curve(train, "reward/mean", "all scored", BLUE),
        *_curve(train, "reward/trained_mean", "trained", TEAL, dashed=True),
    ]
    steps = _StepsOfVersions(train)
    for index, key in enumerate(sorted({key for line in evals for key in filter(is_eval_mean, line)})):
        points = sorted(
            (steps.of(line), value, versions_in_words(line))
            for line in evals
            if (value := number_in(line, key)) is not None and "step" in line
        )
        x, y = _thinned([(step, value) for step, value, _ in points], mean)
        if x:
            colour, notes = OTHERS[(index + 1) % len(OTHERS)], [note for *_, note in points]
            # A joined point stands for several evaluations, so it has no note.
            notes = notes if len(notes) == len(x) else []
            name = key.removesuffix("/mean")
            curves.append(Curve(name=name, colour=colour, x=x, y=y, marks="line and dots", notes=notes))
    return _drawn(Panel(curves=curves, unit="reward"))


def evaluations(train: Sequence[Line], evals: Sequence[Line]) -> list[Panel]:
    """Chart pass@k, truncated responses, components and lengths of each evaluation, over the steps as in ``reward``."""
    steps = _StepsOfVersions(train)
    panels = []
    for name in sorted({name for line in evals for name in eval_names(line)}):
        rows = sorted(
            ({"step": steps.of(line), **eval_numbers(line, name)} for line in evals if "step" in line),
            key=lambda row: row["step"],
        )
        ks = sorted({k for row in rows for k in pass_at_numbers(row)})
        components = sorted({key for row in rows for key in component_numbers(row)})[: len(OTHERS)]
        shares = [(f"pass_at/{k}", f"pass@{k}") for k in ks] + [("truncated_fraction", "cut by a limit")]
        for title, unit, curves in (
            ("pass@k and cut responses", "share", shares),
            ("components of the reward", "reward", [(f"component/{each}", each) for each in components]),
            ("lengths", "tokens", [("length_mean", "mean"), ("length_p95", "95th percentile")]),
        ):
            drawn = [
                curve
                for (key, words), colour in zip(curves, cycle(OTHERS), strict=False)
                for curve in _curve(rows, key, words, colour)
            ]
            panels.append(Panel(curves=drawn, title=f"{name}: {title}", unit=unit, columns=3, height=210))
    return _drawn(*panels)


class _StepsOfVersions:
    """Finds the training step that made a policy version."""

    def __init__(self, train: Sequence[Line]) -> None:
        known = [line for line in train if "weights/version" in line]
        # Versions never descend, because voided lines are left out and no learner reuses a version.
        self._versions = [line["weights/version"] for line in known]
        self._lines = known

    def of(self, line: Line) -> float:
        """Find the step that made the newest version that an eval line used.

        Returns the line's own step if the version is unknown, and the last known step if the version is newer than all.
        """
        served = served_versions(line)
        if served is None or not self._lines:
            return float(line["step"])
        _, newest = served
        at = bisect_left(self._versions, newest)
        if at == len(self._lines):
            return float(self._lines[-1]["step"])
        line_of_version = self._lines[at]
        # A line has weights/gather_s if its step published the version. Else the learner had the version from its start
        # on, which is one step before its first line.
        is_published = self._versions[at] == newest and "weights/gather_s" in line_of_version
        return float(line_of_version["step"] if is_published else max(0, line_of_version["step"] - 1))


def learning(train: Sequence[Line]) -> list[Panel]:
    """Chart what shows whether the policy learns: loss, gradient norm, entropy, KL and so on."""
    kl = [
        *_curve(train, "policy/behaviour_kl", "of the policy that sampled", ORANGE),
        *_curve(train, "policy/engine_kl", "of the engine, at equal weights", GREY),
        *_curve(train, "policy/reference_kl", "from the reference, in the reward", PURPLE),
    ]
    shown = (
        ("Loss", "nats", False, _curve(train, "loss/policy", "loss", BLUE)),
        ("Loss of conversations", "nats", True, _curve(train, "loss/sft", "loss", BLUE)),
        ("Gradient norm before the clip", "", True, _curve(train, "policy/grad_norm", "gradient norm", PURPLE)),
        ("Entropy", "nats", True, _curve(train, "policy/entropy", "entropy", TEAL)),
        ("KL", "nats", True, kl),
        ("Effective share of the sample", "", True, _curve(train, "policy/ess", "effective share", GREEN)),
        ("Learning rate", "", True, _curve(train, "learner/lr", "learning rate", BROWN)),
    )
    return _drawn(
        *(
            Panel(curves=curves, title=title, unit=unit, zero=zero, columns=3, height=210)
            for title, unit, zero, curves in shown
        )
    )


def staleness(train: Sequence[Line]) -> list[Panel]:
    """Chart the staleness of the trained tokens, in versions, and its limit."""
    curves = [
        *_curve(train, "staleness/token_mean", "mean", BLUE),
        *_curve(train, "staleness/token_max", "max", ORANGE, join=max),
        *_curve(train, "staleness/limit", "limit", RED, dashed=True),
    ]
    return _drawn(Panel(curves=curves, unit="versions"))


def utilisation(all_spans: Sequence[Span]) -> list[Panel]:
    """Chart the shares of states over time, stacked, for each kind of resource."""
    panels: list[Panel] = []
    for kind, title in KINDS.items():
        of_kind = [span for span in all_spans if kind in span.shares]
        states = sorted({state for span in of_kind for state in span.shares[kind]}, key=_state_order)
        if not states:
            continue
        origin = of_kind[0].began
        x = [(span.began + span.ended) / 2 - origin for span in of_kind]
        panels.append(
            Panel(
                curves=[
                    Curve(
                        name=state,
                        colour=STATE_COLOURS.get(state, BROWN),
                        x=x,
                        y=[span.shares[kind].get(state, 0.0) for span in of_kind],
                    )
                    for state in states
                ],
                title=title,
                across="time (UTC)",
                stack="bars",
                widths=[span.ended - span.began for span in of_kind],
                shares=True,
                origin=origin,
                height=190,
            )
        )
    return panels


def step_breakdown(train: Sequence[Line]) -> list[Panel]:
    """Chart the seconds of each step by its parts, as stacked bars."""
    rows = []
    for line in train:
        if (step_s := number_in(line, STEP)) is not None:
            parts = {name: number_in(line, f"time/{name}_s") or 0.0 for name in PARTS if name != "other"}
            rows.append({"step": line["step"], **parts, "other": max(0.0, step_s - sum(parts.values()))})
    by_part = {name: series(rows, name, join=mean) for name in PARTS}
    curves = [
        Curve(name=name.replace("_", " "), colour=PARTS[name], x=x, y=y) for name, (x, y) in by_part.items() if any(y)
    ]
    steps = curves[0].x if curves else []
    widths = [1.0, *(after - before for before, after in pairwise(steps))]
    # A bar is as wide as the steps that it stands for, and centred on its last step.
    widths[0] = widths[1] if len(widths) > 1 else 1.0
    return _drawn(Panel(curves=curves, unit="seconds", stack="bars", widths=widths[: len(steps)]))


OF_UPDATES = ("weights/version", "weights/transport", "weights/stall_s")
"""Keys of update lines that are drawn."""


def weight_stall(train: Sequence[Line], updates: Sequence[Line]) -> list[Panel]:
    """Chart the generation time lost to weight updates: a dot for each update of a replica, and the sum by step."""
    curves = []
    for index, transport in enumerate(sorted({str(line.get("weights/transport", "")) for line in updates})):
        chosen = [line for line in updates if str(line.get("weights/transport", "")) == transport]
        chosen.sort(key=lambda line: line.get("weights/version", 0))
        x, y = series(chosen, "weights/stall_s", by="weights/version")
        if x:
            colour = OTHERS[index % len(OTHERS)]
            curves.append(Curve(name=transport or "update", colour=colour, x=x, y=y, marks="dots"))
    whole = _curve(train, "weights/stall_s", "sum of a step", PURPLE)
    each = Panel(curves=curves, title="Each update", unit="seconds", across="weights version", columns=2)
    together = Panel(curves=whole, title="All replicas together", unit="seconds", columns=2)
    return _drawn(each, together)


def lengths(train: Sequence[Line]) -> list[Panel]:
    """Chart the lengths of responses, in tokens."""
    curves = [
        *_curve(train, "rollout/length_mean", "mean", BLUE),
        *_curve(train, "rollout/length_p95", "95th percentile", ORANGE),
        *_curve(train, "rollout/granted_length_mean", "mean of all delivered", GREY, dashed=True),
    ]
    return _drawn(Panel(curves=curves, unit="tokens"))


def episodes(train: Sequence[Line]) -> list[Panel]:
    """Chart the turns of episodes, and the shares of their time by stage."""
    turns = [
        *_curve(train, "rollout/turns_mean", "mean", BLUE),
        *_curve(train, "rollout/turns_p95", "95th percentile", ORANGE),
    ]
    with_stages = [line for line in train if any(name.startswith(SHARE) for name in line)]
    # A line lacks the stages that no episode of its step had.
    by_stage = {
        name: series([{**line, name: number_in(line, name) or 0.0} for line in with_stages], name, join=mean)
        for name in map(SHARE.__add__, STAGES)
    }
    stages = [
        Curve(name=name.removeprefix(SHARE), colour=STAGES[name.removeprefix(SHARE)], x=x, y=y)
        for name, (x, y) in by_stage.items()
        if any(y)
    ]
    return _drawn(
        Panel(curves=turns, title="Turns", unit="turns", columns=2),
        Panel(curves=stages, title="Time by stage", stack="areas", shares=True, columns=2),
    )


def tokens(train: Sequence[Line]) -> list[Panel]:
    """Chart the tokens sampled per second, by all engines together."""
    return _drawn(Panel(curves=_curve(train, "rollout/tokens_per_s", "sampled", GREEN), unit="tokens/s"))


def ledger(train: Sequence[Line]) -> list[Panel]:
    """Chart the number of prompt groups by outcome, since the start of the run."""
    kinds = {"trained": GREEN, "filtered": GREY, "quarantined": RED, "left out": BLUE, "rested": TEAL}
    rows = [
        {"step": line["step"]} | {kind: number_in(line, f"ledger/{kind.replace(' ', '_')}") or 0.0 for kind in kinds}
        for line in train
        if number_in(line, "ledger/trained") is not None
    ]
    curves = []
    for kind, colour in kinds.items():
        x, y = series(rows, kind)
        if any(y):
            curves.append(Curve(name=kind, colour=colour, x=x, y=y))
    return _drawn(Panel(curves=curves, unit="groups", stack="areas"))


def _curve(
    lines: Sequence[Line],
    key: str,
    name: str,
    colour: str,
    *,
    dashed: bool = False,
    join: Callable[[list[float]], float] = mean,
) -> list[Curve]:
    """Make a list with the curve of ``key``; an empty list if no line has a value."""
    x, y = series(lines, key, join=join)
    return [Curve(name=name, colour=colour, x=x, y=y, marks="dashes" if dashed else "line")] if x else []


def _drawn(*panels: Panel) -> list[Panel]:
    """Return the panels that have a point."""
    return [panel for panel in panels if any(curve.x for curve in panel.curves)]


def _state_order(state: str) -> tuple[int, str]:
    """Sort key of states: the order of STATE_COLOURS, then other states by name."""
    known = list(STATE_COLOURS)
    return (known.index(state) if state in known else len(known)), state


# --- states of resources over time ---

KINDS = {"engine": "Engines", "rank": "Learner ranks", "worker": "Reward workers", "player": "Episode workers"}
"""Kinds of resources that are charted, with the titles of their panels."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time between two snapshots (Unix, s), with the shares of states of each kind of resource."""

    began: float
    ended: float
    shares: dict[str, Shares] = field(default_factory=dict)


def spans(snapshots: Iterable[Snapshot]) -> list[Span]:
    """Makes a span for each two neighbouring snapshots of one attempt, except where the Unix clock was set back."""
    made: list[Span] = []
    older: Snapshot | None = None
    for newer in snapshots:
        if older is not None and older.run.attempt == newer.run.attempt and newer.wall > older.wall:
            made.append(_span(older, newer))
        older = newer
    return made


def _span(older: Snapshot, newer: Snapshot) -> Span:
    """Compute the shares of states between two snapshots, for each kind of resource."""
    interval = Interval(older, newer)
    by_kind: dict[str, list[tuple[ActorView, Resource]]] = {}
    for actor in newer.actors:
        for resource in actor.resources:
            by_kind.setdefault(kind_of(actor, resource), []).append((actor, resource))
    shares = {kind: interval.shares(each) for kind, each in by_kind.items()}
    return Span(older.wall, newer.wall, {kind: each for kind, each in shares.items() if each})


def kind_of(actor: ActorView, resource: Resource) -> str:
    """Kind of a resource: engine, rank, worker or player."""
    return "player" if actor.name.startswith("episodes/") else resource.name.partition("/")[0]


def evenly(walls: list[float], most: int) -> list[int]:
    """Returns indices of at most ``most`` of ``walls``, spread evenly over the time, with the first and the last.

    ``walls`` are Unix times (s) in order of recording. Where the clock was set back, no time counts as passed.
    """
    if len(walls) <= most:
        return list(range(len(walls)))
    passed = list(accumulate((max(0.0, newer - older) for older, newer in pairwise(walls)), initial=0.0))
    chosen: list[int] = []
    for index, since in enumerate(passed[:-1]):
        if len(chosen) < most - 1 and since >= passed[-1] * len(chosen) / (most - 1):
            chosen.append(index)
    return [*chosen, len(walls) - 1]

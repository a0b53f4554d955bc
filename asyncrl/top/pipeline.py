"""Lines around the panes: the header, the pipeline with its bottleneck, tabs, time bar and foot. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

from rich.color import Color
from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text
from textual.renderables.sparkline import Sparkline

from asyncrl.core.errors import phase_and_reason, phase_word
from asyncrl.core.formatting import count, duration, fixed, name_some, percent, rate
from asyncrl.messages.monitor import OVER, ActorView
from asyncrl.observe.metrics_line import eval_names, number_in, served_versions
from asyncrl.top.bottleneck import Stage, by_kind, kind_of
from asyncrl.top.client import Away
from asyncrl.top.draw import (
    LEVELS,
    STYLES,
    Choice,
    PaneName,
    Style,
    grid_of,
    joined,
    labelled,
    level_bar,
    state_bar,
    text,
)
from asyncrl.top.replay import Replay
from asyncrl.top.view import SnapshotView, is_gone, total

PHASE_STYLES: dict[str, Style] = {
    "starting": "start",
    **dict.fromkeys(("running", "done"), "good"),
    **dict.fromkeys(("preempting", "draining", "preempted", "stopped"), "warn"),
    **dict.fromkeys(("failed", "stalled"), "bad"),
}
REWARDS = 40
"""Steps whose rewards the header shows, in half as many cells."""
NAMES_SHOWN = 3
LEVEL = Color.parse("#7aa2c4")
WIDEST = 34
"""Most cells of a stage."""


def header(view: SnapshotView) -> Group:
    """Two lines: the state of the run, and its rates."""
    run = view.run
    phase = "stalled" if run.phase == "running" and run.stalled else phase_word(run.phase, run.exit_code)
    step_s, left = view.step_mean("time/step_s"), run.steps - run.step
    trains = phase == "running" and left > 0
    means = [number_in(line, "reward/mean") for line in view.snapshot.train[-REWARDS:]]
    # The rewards are halved, because the difference of the largest floats would be infinite.
    rewards = [value / 2 for value in means if value is not None]
    now = joined(
        text(run.name, "bold"),
        text(phase, PHASE_STYLES.get(phase, "")),
        labelled("step", f"{run.step}/{run.steps}"),
        labelled("version", count(run.version if run.version >= 0 else None)),
        labelled("up", duration(run.age_s)),
        labelled("ETA", duration(left * step_s if step_s is not None and trains else None)),
        labelled("attempt", f"{run.attempt}") if run.attempt > 1 else text(""),
    )
    rates = joined(
        labelled("tokens/s", count(view.rate("rollouter", "rollout/sampled_tokens"))),
        labelled("samples/s", rate(view.rate("rollouter", "rollout/trajectories"))),
        labelled("step", duration(step_s)),
        *_evaluations(view),
    )
    reward = labelled("reward", fixed(2 * rewards[-1] if rewards else None))
    spark = Sparkline(rewards, width=REWARDS // 2, min_color=LEVEL, max_color=LEVEL)
    return Group(now, grid_of([[reward, spark, rates]], Column(no_wrap=True), Column(width=REWARDS // 2), Column()))


def _evaluations(view: SnapshotView) -> list[Text]:
    """The newest mean of each evaluation, with the versions that sampled it."""
    newest, found = {name: line for line in view.snapshot.evals for name in eval_names(line)}, []
    for name, line in sorted(newest.items()):
        versions = "–".join(map(str, dict.fromkeys(served_versions(line) or ())))
        mean = labelled(name, fixed(number_in(line, f"eval/{name}/mean"), 3))
        found.append(mean + text(f" v{versions}" if versions else "", "dim"))
    return found


# --- stages ---


class StageBox(NamedTuple):
    """A stage of the pipeline."""

    stage: Stage
    actors: Sequence[ActorView]
    rate: float | None
    """Work per second, in ``unit``."""
    unit: str
    inside: str
    """Work that is in the stage or waits for it, in words."""
    bar: RenderableType
    """The time of its resources by kinds of states, or a level."""
    last: Text
    """The main state, or a number."""


def stages(view: SnapshotView, wide: int = WIDEST) -> list[StageBox]:
    """A box of ``wide`` cells for each stage of the pipeline, in the order of the flow."""
    of, level, rate_of, run = view.of, view.level, view.rate, view.run
    outstanding, gate = level("dataloader", "tickets/outstanding"), level("dataloader", "tickets/gate")
    admitted, allowed = f"gate {count(outstanding)}/{count(gate)}", staleness_limit(view)
    limit = text(f"limit {fixed(allowed, 0)} of {run.staleness_max}" if allowed is not None else "", "dim")
    generating = f"{count(level('rollouter', 'rollout/in_flight'))} in flight"
    at_reward = total((level("reward", "reward/queued"), level("reward", "reward/running")))
    step_s, groups = view.step_mean("time/step_s"), run.groups_per_step
    trained = groups / step_s if step_s and groups and run.phase not in OVER else None
    buffered = f"{count(view.buffered)}/{count(groups or None)} groups"
    updated, servers = rate_of("parameter_server", "weights/updates_committed"), of("parameter_server")
    behind, serving = view.behind or (None, None)
    newest = level_bar(serving - behind if behind is not None and serving is not None else None, serving)
    version = text(f"version {run.version}" if run.version >= 0 else "none so far", "dim")
    leased, scored = rate_of("dataloader", "tickets/granted"), rate_of("reward", "reward/scored")
    sampled = rate_of("rollouter", "rollout/sampled_tokens")
    spent = (view.shares(of("rollouter")), view.shares(of("reward")), view.learner_shares)
    engines, pools, rank = (_time(shares, wide) for shares in spent)
    return [
        StageBox("dataloader", of("dataloader"), leased, "groups", admitted, level_bar(outstanding, gate), limit),
        StageBox("rollouters", of("rollouter"), sampled, "tokens", generating, *engines),
        StageBox("reward", of("reward"), scored, "tasks", f"{count(at_reward)} in hand", *pools),
        StageBox("learner", of("learner"), trained, "groups", buffered, *rank),
        StageBox("weights", servers, updated, "updates", f"{count(behind)} behind", newest, version),
    ]


def _time(shares: Mapping[str, float], wide: int) -> tuple[Text, Text]:
    """A bar of a stage's time, and the state with the largest share of it."""
    state = max(shares, key=lambda state: shares[state], default="")
    words = f"{percent(shares[state])} {state}" if state else ""
    return state_bar(by_kind(shares), wide), text(words, "dim" if kind_of(state) == "wait" else "")


def marked(view: SnapshotView) -> str:
    """The stage that sets the pace; empty if that is unknown."""
    stage = view.bottleneck.stage or ""
    return {"gate": "dataloader", "episodes": "rollouters"}.get(stage, stage)


def pipeline(view: SnapshotView, width: int) -> Group:
    """Each stage with its rate, depth, time and main state, and below them the verdict."""
    wide = min(WIDEST, (width + 2) // len(get_args(Stage)) - 2)
    columns = [_drawn(box, view, wide) for box in stages(view, wide)]
    return Group(grid_of(zip(*columns, strict=True), *(Column(width=wide) for _ in columns)), *verdict(view))


def _drawn(box: StageBox, view: SnapshotView, wide: int) -> tuple[RenderableType, ...]:
    """Five lines of a stage: its actors and name, rate, depth, a bar, and its main state."""
    is_marked, actors = box.stage == marked(view), len(box.actors)
    alive = sum(not is_gone(actor) for actor in box.actors)
    style: Style = "mark" if is_marked else "bold"
    present = f"{alive}/{actors} " if alive < actors else f"{actors} " if actors > 1 else ""
    is_short = alive < actors and view.run.phase not in ("draining", "done", "failed")
    mark, count_there = text("◆" if is_marked else "", style), text(present, "bad" if is_short else "dim")
    title = joined(mark, count_there, text(f"{box.stage} ", style), between="")
    end = title.cell_len
    title.align("left", wide, "━" if is_marked else "─")
    title.stylize(STYLES["mark" if is_marked else "dim"], end)
    words = f"{rate(box.rate)} {box.unit}/s"
    words = words if len(words) <= wide else words.replace("tokens/s", "tok/s")
    return title, text(words), text(box.inside), box.bar, box.last


def staleness_limit(view: SnapshotView) -> float | None:
    """The limit by which the gate works now; if unknown, that of the newest step."""
    limit = view.level("dataloader", "staleness/limit")
    return view.number("staleness/limit") if limit is None else limit


def verdict(view: SnapshotView) -> list[Text]:
    """The stage that sets the pace, or the reason that nothing runs. Actors that are down come first."""
    run, bottleneck = view.run, view.bottleneck
    word: str
    style: Style
    if run.phase in ("done", "failed", "draining", "preempting"):
        reason = run.reason or ("all steps are trained" if run.phase == "done" else "")
        word, _, why = phase_and_reason(run.phase, run.exit_code, reason).partition(": ")
        style = PHASE_STYLES[word]
    elif run.stalled:
        word, why, style = "stalled", run.stalled, "bad"
    elif run.phase == "starting":
        word, style = "starting", "start"
        why = f"waiting for {name_some(run.waiting_for, NAMES_SHOWN)}" if run.waiting_for else ""
    elif bottleneck.stage is None:
        word, why, style = "bottleneck", bottleneck.why or "unknown", "dim"
    else:
        word, why, style = f"◆ {bottleneck.stage}", bottleneck.why, "mark"
    resting = [f"{name} ({why})" for name, why in run.resting.items()]
    problems = {"lost hosts: ": run.lost_hosts, "resting: ": resting, "down: ": down(view)}
    missing = joined(
        *(text(title, "bad") + text(name_some(names, NAMES_SHOWN)) for title, names in problems.items() if names)
    )
    said = text(word + (":" if why else ""), style, wraps=True) + text(f" {why}")
    return [missing, said] if missing else [said]


def down(view: SnapshotView) -> list[str]:
    """Actors of a running run that do not serve, with the reason; empty during a stall, whose report names them."""
    found = []
    for actor in view.snapshot.actors if view.run.phase == "running" and not view.run.stalled else ():
        if actor.condition in ("dead", "condemned", "silent"):
            found.append(f"{actor.name} ({actor.condition})")
        elif actor.condition == "starting" and actor.restarts:
            found.append(f"{actor.name} (starting again)")
        elif actor.condition == "ready" and any(resource.state == "restarting" for resource in actor.resources):
            found.append(f"{actor.name} (engine restarting)")
    return found


# --- tabs, time bar, foot ---


def tabs(panes: Sequence[PaneName], seen: PaneName, width: int) -> Text:
    """The numbers and names of the panes, with the ``seen`` one marked; without room, only its name is shown."""
    wide = sum(len(name) + 4 for name in panes) - 2 <= width
    parts = (
        text(f"{n} {name if wide or name == seen else ''}".rstrip(), "chosen" if name == seen else "dim")
        for n, name in enumerate(panes, 1)
    )
    return joined(*parts, between="  ")


def time_bar(replay: Replay) -> Grid:
    """Place of the viewer in a recording, as a bar."""
    past, whole = replay.position - replay.begin, replay.end - replay.begin
    at = f"{time.strftime('%H:%M:%S', time.localtime(replay.position))}  {duration(past)} of {duration(whole)}"
    speed = text(f"×{replay.speed:g} {'playing' if replay.playing else 'paused'}", "dim")
    columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
    return grid_of([[text(at), level_bar(past, whole), speed]], *columns, expand=True)


def status(over: str, away: Away | None, replay: Replay | None, *, frozen: bool, attached: bool) -> Text:
    """The status in words: frozen, replay, over, no answer, live or attaching.

    ``over`` is the reason that no more snapshots come, empty while they may. ``attached``: whether a snapshot is known.
    """
    if frozen:
        return text("frozen, space continues", "warn")
    if replay is not None:
        cut = replay.at_end and replay.lives
        return text("replay", "level") + text("  the recording ended here when it was read" if cut else "", "warn")
    if over:
        return text(over, "warn")
    if away is not None and away.seconds is None:
        return text(away.reason, "warn")
    if away is not None:
        reason = f": {away.reason}" if away.reason else ""
        return text(f"no answer for {duration(away.seconds)}", "bad") + text(f", still asking{reason}", "dim")
    return text("live", "good") if attached else text("attaching", "start")


def foot(status: Text, choice: Choice) -> Grid:
    """The status, what is filtered and how rows are sorted, and the first keys."""
    chosen = [f"filter: {choice.needle}"] if choice.needle else []
    if choice.level != LEVELS[0]:
        chosen.append(f"events: {choice.level}")
    if choice.sort != "host" or choice.descending:
        chosen.append(f"sort: {choice.sort}{'▾' if choice.descending else '▴'}")
    left = joined(status, text("   ".join(chosen), "warn"))
    return grid_of([[left, text("? help  q quit", "dim")]], Column(ratio=1), Column(no_wrap=True), expand=True)

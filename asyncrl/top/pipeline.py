"""Lines around the panes: the header, the pipeline with its bottleneck, tabs, time bar and foot. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

from asyncrl.core.errors import phase_and_reason, phase_word
from asyncrl.core.numbers import count, duration, fixed, percent, rate
from asyncrl.core.printable import name_some
from asyncrl.messages.monitor import OVER, ActorView
from asyncrl.observe.metrics_line import is_eval_mean, number_in, served_versions
from asyncrl.top.bottleneck import Stage, by_kind, kind_of
from asyncrl.top.client import Away, Waiting
from asyncrl.top.draw import (
    LEVELS,
    NARROW,
    Bar,
    Choice,
    Facts,
    PaneName,
    Style,
    joined,
    labelled,
    level_bar,
    side_by_side,
    sparkline,
    state_bar,
    text,
    wrapped,
)
from asyncrl.top.replay import Replay
from asyncrl.top.view import SnapshotView, is_gone, total

PHASE_STYLES: dict[str, Style] = {
    "starting": "start",
    "running": "good",
    "preempting": "warn",
    "draining": "warn",
    "done": "good",
    "failed": "bad",
    "stopped": "warn",
    "preempted": "warn",
    "stalled": "bad",
}
REWARDS = 40
"""Steps whose rewards the header shows."""
NAMES_SHOWN = 3
SHORT = {"rollouters": "roll.", "dataloader": "data."}
"""Short names of stages, if the number of actors takes the room of the name."""


def header(view: SnapshotView, width: int) -> Group:
    """Two lines: the state of the run, and its rates."""
    run = view.run
    phase = "stalled" if run.phase == "running" and run.stalled else phase_word(run.phase, run.exit_code)
    means = [number_in(line, "reward/mean") for line in view.snapshot.train[-REWARDS:]]
    rewards = [value for value in means if value is not None]
    spark = sparkline(rewards, max(8, min(40, width - 72)))
    return Group(
        Facts(
            text(run.name, "bold"),
            text(phase, PHASE_STYLES.get(phase, "")),
            labelled("step", f"{run.step}/{run.steps}"),
            labelled("version", count(run.version if run.version >= 0 else None)),
            labelled("up", duration(run.age_s)),
            labelled("ETA", duration(view.eta_s)),
            labelled("attempt", f"{run.attempt}") if run.attempt > 1 else text(""),
        ),
        Facts(
            labelled("reward", fixed(rewards[-1] if rewards else None)) + text(f" {spark}" if spark else "", "level"),
            labelled("tokens/s", count(view.tokens_per_s)),
            labelled("samples/s", rate(view.rate("rollouter", "rollout/trajectories"))),
            labelled("step", duration(view.step_mean("time/step_s"))),
            *_evaluations(view),
        ),
    )


def _evaluations(view: SnapshotView) -> list[Text]:
    """The newest mean of each evaluation, with the versions that sampled it."""
    means = {key: line for line in view.snapshot.evals for key in filter(is_eval_mean, line)}
    found = []
    for key, line in sorted(means.items()):
        if (value := number_in(line, key)) is not None:
            versions = "–".join(map(str, dict.fromkeys(served_versions(line) or ())))
            name = key.removeprefix("eval/").removesuffix("/mean")
            found.append(labelled(name, fixed(value, 3)) + text(f" v{versions}" if versions else "", "dim"))
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
    bar: Bar
    """The time of its resources by kinds of states, or a level."""
    last: Text
    """The main state, or a number."""

    @property
    def alive(self) -> int:
        """Number of its actors that are not gone."""
        return sum(not is_gone(actor) for actor in self.actors)


def stages(view: SnapshotView) -> list[StageBox]:
    """A box for each stage of the pipeline, in the order of the flow."""
    of, level, rate_of, run = view.of, view.level, view.rate, view.run
    outstanding, gate = level("dataloader", "tickets/outstanding"), level("dataloader", "tickets/gate")
    admitted, allowed = f"gate {count(outstanding)}/{count(gate)}", staleness_limit(view)
    limit = f"limit {fixed(allowed, 0)} of {run.staleness_max}" if allowed is not None else ""
    generating = f"{count(level('rollouter', 'rollout/in_flight'))} in flight"
    at_reward = total((level("reward", "reward/queued"), level("reward", "reward/running")))
    step_s, groups = view.step_mean("time/step_s"), run.groups_per_step
    trained = groups / step_s if step_s and groups and run.phase not in OVER else None
    buffered = f"{count(view.buffered)}/{count(groups or None)} groups"
    updated, servers = rate_of("parameter_server", "weights/updates_committed"), of("parameter_server")
    behind, serving = view.behind or (None, None)
    newest = level_bar(serving - behind, serving) if behind is not None and serving is not None else Bar([])
    version = f"version {run.version}" if run.version >= 0 else "none so far"
    leased, scored = rate_of("dataloader", "tickets/granted"), rate_of("reward", "reward/scored")
    engines, pools, rank = _time(view.shares(of("rollouter"))), _time(view.shares(of("reward"))), view.learner_shares
    return [
        StageBox(
            "dataloader", of("dataloader"), leased, "groups", admitted, level_bar(outstanding, gate), text(limit, "dim")
        ),
        StageBox("rollouters", of("rollouter"), view.tokens_per_s, "tokens", generating, *engines),
        StageBox("reward", of("reward"), scored, "tasks", f"{count(at_reward)} in hand", *pools),
        StageBox("learner", of("learner"), trained, "groups", buffered, *_time(rank)),
        StageBox("weights", servers, updated, "updates", f"{count(behind)} behind", newest, text(version, "dim")),
    ]


def _time(shares: Mapping[str, float]) -> tuple[Bar, Text]:
    """A bar of the time, and the main state."""
    state = max(shares, key=lambda state: shares[state], default="")
    words = f"{percent(shares[state])} {state}" if state else ""
    return state_bar(by_kind(shares)), text(words, "dim" if kind_of(state) == "wait" else "")


def marked(view: SnapshotView) -> str:
    """The stage that sets the pace; empty if that is unknown."""
    stage = view.bottleneck.stage or ""
    return {"gate": "dataloader", "episodes": "rollouters"}.get(stage, stage)


def pipeline(view: SnapshotView, width: int) -> Group:
    """Each stage with its rate, depth, time and main state, and below them the verdict: seven lines."""
    between = "→ " if width < NARROW else " → "
    boxes = stages(view)
    wide = min(34, (width - len(between) * (len(boxes) - 1)) // len(boxes))
    grid = Grid.grid(*(Column(width=len(between) if n % 2 else wide) for n in range(2 * len(boxes) - 1)))
    for number, parts in enumerate(zip(*(_drawn(box, view, wide) for box in boxes), strict=True)):
        # The arrows stand between the rates.
        arrow = text(between if number == 1 else "", "dim")
        grid.add_row(*[each for part in parts for each in (part, arrow)][:-1])
    return Group(grid, *verdict(view, width))


def _drawn(box: StageBox, view: SnapshotView, wide: int) -> tuple[Text, Text, Text, Bar, Text]:
    """Five lines of a stage: its name with its actors, rate, depth, a bar, and its main state."""
    is_marked, actors, alive = box.stage == marked(view), len(box.actors), box.alive
    mark, rule = ("◆", "━") if is_marked else ("", "─")
    present = f" {alive}/{actors}" if alive < actors else f" {actors}" if actors > 1 else ""
    room = wide - len(present)
    name = f"{mark}{box.stage}"
    if len(name) > room:
        name = f"{mark}{SHORT.get(box.stage, box.stage)}"[:room]
    over = view.run.phase in ("draining", "done", "failed")
    title = (
        text(name, "mark" if is_marked else "bold")
        + text(f" {rule * (room - len(name) - 1)}"[: room - len(name)], "mark" if is_marked else "dim")
        + text(present, "bad" if alive < actors and not over else "dim")
    )
    words = f"{rate(box.rate)} {box.unit}/s"
    # A blank stands before the arrow.
    words = words if len(words) < wide else words.replace("tokens/s", "tok/s")
    return title, text(words), text(box.inside), box.bar, box.last


def staleness_limit(view: SnapshotView) -> float | None:
    """The limit by which the gate works now; if unknown, that of the newest step."""
    limit = view.level("dataloader", "staleness/limit")
    return view.number("staleness/limit") if limit is None else limit


def verdict(view: SnapshotView, width: int) -> list[Text]:
    """Two lines: the stage that sets the pace, or the reason that nothing runs. Actors that are down come first."""
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
    problems = {"lost hosts: ": run.lost_hosts, "resting: ": resting, "down: ": view.down}
    missing = joined(
        *(text(title, "bad") + text(name_some(names, NAMES_SHOWN)) for title, names in problems.items() if names)
    )
    head = text(word + (":" if why else ""), style) + text(f" {why}")
    return [missing, *wrapped(head, width, 1)] if missing else [*wrapped(head, width, 2), text("")][:2]


# --- tabs, time bar, foot ---

KEYS = ("? help", "q quit", "s sort", "/ filter", "space {space}")
"""Hints of the keys, as many as there is room for."""


def tabs(panes: Sequence[PaneName], seen: PaneName, width: int) -> Text:
    """The numbers and names of the panes, with the ``seen`` one marked; without room, only its name is shown."""

    def with_names(names: Sequence[str]) -> Text:
        numbered = enumerate(names, 1)
        parts = (text(f"{n} {name}".rstrip(), "chosen" if name == seen else "dim") for n, name in numbered)
        return joined(*parts, between="  ")

    line = with_names(panes)
    return line if line.cell_len <= width else with_names([name if name == seen else "" for name in panes])


def time_bar(replay: Replay) -> Grid:
    """Place of the viewer in a recording, as a bar."""
    past, whole = replay.position - replay.begin, replay.end - replay.begin
    return side_by_side(
        text(f"{time.strftime('%H:%M:%S', time.localtime(replay.position))}  {duration(past)} of {duration(whole)}"),
        level_bar(past, whole),
        text(f"×{replay.speed:g} {'playing' if replay.playing else 'paused'}", "dim"),
        expand=True,
    )


def status(over: str, away: Away | Waiting | None, replay: Replay | None, *, frozen: bool, attached: bool) -> Text:
    """The status in words: frozen, replay, over, no answer, live or attaching."""
    if frozen:
        return text("frozen, space continues", "warn")
    if replay is not None:
        ended = replay.at_end and replay.lives
        return text("replay", "level") + text("  end of the recording; the run continues" if ended else "", "warn")
    if over:
        return text(over, "warn")
    if isinstance(away, Waiting):
        return text(away.reason, "warn")
    if away is not None:
        reason = f": {away.reason}" if away.reason else ""
        return text(f"no answer for {duration(away.seconds)}", "bad") + text(f", still asking{reason}", "dim")
    return text("live", "good") if attached else text("attaching", "start")


def foot(status: Text, choice: Choice, *, replay: bool) -> Grid:
    """The status, what is filtered, and the keys that fit."""
    chosen = [f"filter: {choice.needle}"] if choice.needle else []
    if choice.level != LEVELS[0]:
        chosen.append(f"events: {choice.level}")
    keys = [text(key.format(space="play" if replay else "freeze"), "dim") for key in KEYS]
    return side_by_side(joined(status, text("   ".join(chosen), "warn")), Facts(*keys, between="  "), expand=True)

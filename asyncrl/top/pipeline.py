"""Lines around the panes: the header, the pipeline with who waits on whom, tabs, time bar and foot. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from asyncrl.text.numbers import count, duration, fixed, percent, rate
from asyncrl.text.phase import phase_and_reason, phase_word
from asyncrl.top.drawing.layout import LEVELS, NARROW, Choice, PaneName
from asyncrl.top.drawing.text import (
    Glyphs,
    Line,
    Style,
    fit,
    fitting,
    joined,
    length,
    level_bar,
    said,
    sparkline,
    state_bar,
    wrapped,
)
from asyncrl.top.figures.bottleneck import Stage, kind_of
from asyncrl.top.figures.document import Document, StageRow
from asyncrl.top.source.client import Away
from asyncrl.top.source.replay import Replay

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
NAMES_SHOWN = 3
SHORT = {"rollouters": "roll.", "dataloader": "data."}
"""Short names, for stages where the number of actors takes the room of the name."""
ROOMY = 16
"""Width from which on a stage has room for blanks."""


def header(document: Document, width: int, glyphs: Glyphs) -> list[Text]:
    """Two lines: the state of the run, and its rates."""
    run = document.run
    stalled = run.phase == "running" and run.stalled
    phase = "stalled" if stalled else phase_word(run.phase, run.exit_code)
    first: list[Line] = [
        [(run.name, "bold")],
        [(phase, PHASE_STYLES.get(phase, ""))],
        said("step", f"{run.step}/{run.steps}"),
        said("version", count(run.version if run.version >= 0 else None)),
        said("up", duration(run.age_s)),
        said("ETA", duration(run.eta_s)),
        said("attempt", f"{run.attempt}") if run.attempt > 1 else [],
    ]
    spark = sparkline(run.rewards, max(8, min(40, width - 72)), glyphs)
    second: list[Line] = [
        [*said("reward", fixed(run.reward)), (f" {spark}" if spark else "", "level")],
        said("tokens/s", count(run.tokens_per_s)),
        said("samples/s", rate(run.samples_per_s)),
        said("step", duration(run.step_s)),
    ]
    for name, mean in sorted(run.evals.items()):
        versions = "–".join(map(str, dict.fromkeys(run.eval_versions.get(name, ()))))
        second.append([*said(name, fixed(mean, 3)), (f" v{versions}" if versions else "", "dim")])
    return [fit(fitting(parts, width), width, glyphs) for parts in (first, second)]


def pipeline(document: Document, width: int, glyphs: Glyphs) -> list[Text]:
    """Each stage with its rate, depth, time and main state, and below them the verdict: seven lines."""
    between = f"{glyphs.arrow} " if width < NARROW else f" {glyphs.arrow} "
    stages = document.stages
    wide = min(34, (width - len(between) * (len(stages) - 1)) // len(stages))
    boxes = [[fit(line, wide, glyphs) for line in _stage(stage, document, wide, glyphs)] for stage in stages]
    # The arrows stand between the rates.
    gaps = [fit([(between if number == 1 else "", "dim")], len(between), glyphs) for number in range(len(boxes[0]))]
    lines = [gap.join(parts) for gap, parts in zip(gaps, zip(*boxes, strict=True), strict=True)]
    return [*lines, *verdict(document, width, glyphs)]


def _stage(stage: StageRow, document: Document, wide: int, glyphs: Glyphs) -> list[Line]:
    mark = glyphs.mark if wide < ROOMY else f"{glyphs.mark} "
    name = f"{mark}{stage.stage}" if stage.bottleneck else stage.stage
    rule = glyphs.strong_rule if stage.bottleneck else glyphs.rule
    there = f"{stage.actors}/{stage.expected}" if stage.actors < stage.expected else ""
    if not there and stage.expected > 1:
        there = f"{stage.expected}"
    style: Style = "mark" if stage.bottleneck else "bold"
    room = wide - len(there) - bool(there)
    if len(name) > room:
        name = name.replace(stage.stage, SHORT.get(stage.stage, stage.stage))[:room]
    fill = wide - len(name) - len(there) - bool(there)
    top: Line = [(name, style), (f" {rule * (fill - 1)}" if fill > 0 else "", "mark" if stage.bottleneck else "dim")]
    if there:
        over = document.run.phase in ("draining", "done", "failed")
        top.append((f" {there}", "bad" if stage.actors < stage.expected and not over else "dim"))
    return [
        top,
        [(_rate(stage, wide), "")],
        [(DEPTHS[stage.stage].format(depth=count(stage.depth), limit=count(stage.depth_limit)), "")],
        _bar(stage, wide, glyphs),
        _state(stage, document),
    ]


DEPTHS: dict[Stage, str] = {
    "dataloader": "gate {depth}/{limit}",
    "rollouters": "{depth} in flight",
    "reward": "{depth} in hand",
    "learner": "{depth}/{limit} groups",
    "weights": "{depth} behind",
}


def _rate(stage: StageRow, wide: int) -> str:
    """Rate of a stage, with a blank before the arrow."""
    words = f"{rate(stage.rate)} {stage.unit}/s"
    return words if len(words) < wide else words.replace("tokens/s", "tok/s")


def _bar(stage: StageRow, wide: int, glyphs: Glyphs) -> Line:
    if stage.stage == "dataloader":
        return level_bar(stage.depth, stage.depth_limit, wide, glyphs)
    if stage.stage == "weights":
        current = None if stage.depth is None or stage.depth_limit is None else stage.depth_limit - stage.depth
        return level_bar(current, stage.depth_limit, wide, glyphs)
    return state_bar(stage.kinds, wide, glyphs)


def _state(stage: StageRow, document: Document) -> Line:
    """The state in which most of the time was spent; for stages without one, what there is to say."""
    if stage.stage == "dataloader":
        limit = document.staleness.limit
        return [(f"limit {fixed(limit, 0)} of {document.staleness.max}" if limit is not None else "", "dim")]
    if stage.stage == "weights":
        return [(f"version {document.run.version}" if document.run.version >= 0 else "none so far", "dim")]
    if not stage.states:
        return []
    state, share = max(stage.states.items(), key=lambda item: item[1])
    return [(f"{percent(share)} {state}", "dim" if kind_of(state) == "wait" else "")]


def verdict(document: Document, width: int, glyphs: Glyphs) -> list[Text]:
    """Two lines: who is down, and who sets the pace, or what keeps the run."""
    run, found = document.run, document.bottleneck
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
        why = f"waiting for {_some(run.waiting_for)}" if run.waiting_for else ""
    elif found.stage is None:
        word, why, style = "bottleneck", found.why or "unknown", "dim"
    else:
        word, why, style = f"{glyphs.mark} {found.stage}", found.why, "mark"
    aside = [f"{name} ({why})" for name, why in run.aside.items()]
    amiss = {"lost hosts: ": run.lost_hosts, "set aside: ": aside, "down: ": run.down}
    missing: list[Line] = [[(title, "bad"), (_some(names), "")] for title, names in amiss.items() if names]
    # All that wait, wait for these.
    first = [fit(joined(missing), width, glyphs)] if missing else []
    head: Line = [(word + (":" if why else ""), style), (f" {why}", "")]
    return [*first, *wrapped(head, width, 2 - len(first), glyphs), Text()][:2]


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# --- tabs, time bar, foot ---

KEYS = ("? help", "q quit", "s sort", "/ filter", "space {space}")
"""Hints of the keys, as many as there is room for."""


def tabs(panes: Sequence[PaneName], seen: PaneName, width: int) -> Line:
    """The panes of the run, of which one is seen; where there is no room for all of their names, that one's."""

    def line(*, whole: bool) -> Line:
        parts: list[Line] = []
        for number, name in enumerate(panes, 1):
            chosen = name == seen
            parts.append([(f"{number} {name}" if whole or chosen else f"{number}", "chosen" if chosen else "dim")])
        return joined(parts, "  ")

    found = line(whole=True)
    return found if length(found) <= width else line(whole=False)


def time_bar(replay: Replay, width: int, glyphs: Glyphs) -> Line:
    """Place of the viewer in a recording, as a bar."""
    past, whole = replay.position - replay.begin, replay.end - replay.begin
    left = f"{time.strftime('%H:%M:%S', time.localtime(replay.position))}  {duration(past)} of {duration(whole)}  "
    right = f"  ×{replay.speed:g} {'playing' if replay.playing else 'paused'}"
    bar = level_bar(past, whole, max(4, width - len(left) - len(right)), glyphs)
    return [(left, ""), *bar, (right, "dim")]


def status(over: str, away: Away | None, replay: Replay | None, *, frozen: bool, attached: bool) -> Line:
    """Status of the picture that is seen: frozen, a replay, over, away, live or attaching."""
    if frozen:
        return [("frozen, space goes on", "warn")]
    said: Line
    if replay is not None:
        said = [("replay", "level")]
        if replay.at_end and replay.lives:
            said.append(("  up to here; the run goes on", "warn"))
        return said
    if over:
        return [(over, "warn")]
    if away is not None:
        said = [(f"no answer for {duration(away.seconds)}", "bad"), (", asked on", "dim")]
        return [*said, (f": {away.reason}", "dim")] if away.reason else said
    return [("live", "good")] if attached else [("attaching", "start")]


def foot(status: Line, choice: Choice, width: int, *, replay: bool) -> Line:
    """The status, what is filtered, and the keys where there is room for them."""
    chosen = [f"filter: {choice.needle}"] if choice.needle else []
    if choice.level != LEVELS[0]:
        chosen.append(f"events: {choice.level}")
    line = [*status, (f"   {'   '.join(chosen)}", "warn")] if chosen else list(status)
    keys, room = [key.format(space="play" if replay else "freeze") for key in KEYS], width - length(line)
    while keys and len("  ".join(keys)) + 2 > room:
        keys.pop()
    return [*line, (f"{'  '.join(keys):>{room}}", "dim")] if keys else line

"""The panes by name, one by one or as a page of text. Pure."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Column as GridColumn
from rich.text import Text

from asyncrl.core.formatting import ABSENT, count, duration, exact, fixed, percent, rate, size
from asyncrl.messages.monitor import Event
from asyncrl.observe import metrics_line
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.observe.metrics_line import number_in
from asyncrl.rpc.lifecycle.roster import CONTROLLER
from asyncrl.top.actor_panes import BAR, HOST, ActorRow, episodes, rollouters, rows_of
from asyncrl.top.bottleneck import by_kind
from asyncrl.top.draw import (
    LEVELS,
    THERE,
    Choice,
    Column,
    Pane,
    PaneName,
    Style,
    grid_of,
    in_columns,
    joined,
    labelled,
    level_bar,
    lines,
    number,
    state_bar,
    table_of,
    text,
    warn_style,
)
from asyncrl.top.pipeline import header, pipeline, staleness_limit
from asyncrl.top.view import SnapshotView, is_gone

NONE = text("")
"""An empty text, which ``joined`` leaves out; also an empty line of a page."""
LEVEL_STYLES: dict[str, Style] = {"info": "dim", "warning": "warn", "error": "bad", "critical": "bad"}


# --- learner ---


def _gpu_memory(entry: ActorRow) -> Text:
    """Used and whole memory of the actor's GPUs, if the actor can work."""
    gpus = entry.actor.gpus if entry.condition in THERE else []
    used, whole = sum(gpu.memory_bytes for gpu in gpus), sum(gpu.memory_total_bytes for gpu in gpus)
    return text(f"{size(used)}/{size(whole)}" if gpus else ABSENT)


RANKS = (
    Column("rank", lambda entry: entry.name(), width=9),
    HOST,
    Column("state", lambda entry: entry.state, width=14),
    Column("time", lambda entry: entry.bar, width=BAR),
    number("memory", lambda entry: entry.there(entry.actor.rss_bytes or None), size, width=7),
    Column("GPU memory", _gpu_memory, right=True),
)
PHASES = {
    "wait": "time/wait_for_groups_s",
    "GPU": "time/take_gpu_s",
    "train": "time/train_s",
    "publish": "time/publish_s",
}
"""Metrics of the phases of a step, by their words."""
COMPONENTS = 12
"""Most components of the reward that the pane shows."""


def learner(view: SnapshotView, choice: Choice) -> Pane:
    """Phases of a step, numbers of the newest step, and a row for each rank."""
    head = [_step(view), _learning(view), _speed(view), *_components(view), *_evaluations(view)]
    return Pane(head, table_of(RANKS, rows_of(view, "learner", choice), lambda entry: entry.actor.name), "learner/0")


def _step(view: SnapshotView) -> Text:
    """Duration of a step, and of each of its phases."""
    whole = view.step_mean("time/step_s")
    seconds = {words: view.step_mean(key) for words, key in PHASES.items()}
    if whole is None and not any(each is not None for each in seconds.values()):
        return text("only a first step is trained so far" if view.run.step else "no step is trained so far", "dim")
    phases = [
        labelled(words, duration(each)) + text(f" {percent(each / whole)}" if whole else "", "dim")
        for words, each in seconds.items()
        # Only time slices cost a wait for the GPU.
        if each is not None and (each or words != "GPU")
    ]
    # With two blanks all phases fit into 79 cells.
    return joined(labelled("step", duration(whole), "bold"), *phases, between="  ")


def _learning(view: SnapshotView) -> Text:
    """Numbers of the newest step. A gradient or a learning rate of 0 stands out: the policy learns nothing."""
    norm, lr = view.number("policy/grad_norm"), view.number("learner/lr")
    return joined(
        labelled("loss", fixed(view.number("loss/policy"), 3)),
        labelled("grad norm", fixed(norm, 3), "bad" if norm == 0 else ""),
        labelled("entropy", fixed(view.number("policy/entropy"), 3)),
        labelled("KL", fixed(view.number("policy/behaviour_kl"), 3)),
        labelled("lr", fixed(lr, 3), "bad" if lr == 0 else ""),
    )


def _speed(view: SnapshotView) -> Text:
    """Speed and reward of the newest step. Tokens and MFU are over all ranks, which train a step together."""
    first = next(iter(view.of("learner")), None)
    tokens = view.rate_of(first, "learner/tokens") if first is not None else None
    mfu = view.number("perf/mfu") if first is not None and not is_gone(first) else None
    mean, deviation = view.number("reward/mean"), view.number("reward/std")
    spread = f" ± {fixed(deviation, 3)}" if deviation is not None else ""
    # A step has no engine KL if no token was sampled at the weights that the step trained.
    engine_kl = view.number("policy/engine_kl")
    return joined(
        labelled("trained tokens/s", count(tokens)),
        labelled("MFU", percent(mfu)) if mfu is not None else NONE,
        labelled("reward", fixed(mean, 3)) + text(spread, "dim") if mean is not None else NONE,
        _cut(view.number("rollout/truncated_fraction")),
        labelled("engine KL", fixed(engine_kl, 3)) if engine_kl is not None else NONE,
    )


def _cut(share: float | None) -> Text:
    """Share of the responses that a limit cut; a high share stands out."""
    return (
        labelled("cut", percent(share), "bad" if share >= metrics_line.HIGH_TRUNCATION else "")
        if share is not None
        else NONE
    )


def _components(view: SnapshotView) -> list[Text]:
    """Means of the reward's components in the newest step."""
    found = sorted(metrics_line.numbers_after(view.last, "reward/component/").items())
    parts = [labelled(name, fixed(value, 3)) for name, value in found[:COMPONENTS]]
    if (more := len(found) - COMPONENTS) > 0:
        parts.append(text(f"and {more} more", "dim"))
    return [joined(text("components", "dim"), *parts)] if parts else []


def _evaluations(view: SnapshotView) -> list[Text]:
    """A line for each evaluation that has more to show than the mean in the header."""
    found = {name: line for line in view.snapshot.evals for name in metrics_line.eval_names(line)}
    shown = []
    for name, line in sorted(found.items()):
        values = metrics_line.eval_numbers(line, name)
        tokens, components = values.get("length_mean"), metrics_line.component_numbers(values)
        parts = [
            *(labelled(f"pass@{k}", fixed(each, 3)) for k, each in metrics_line.pass_at_numbers(values).items()),
            labelled("length", count(tokens)) if tokens is not None else NONE,
            _cut(values.get("truncated_fraction")),
            *(labelled(component, fixed(each, 3)) for component, each in sorted(components.items())),
        ]
        if any(parts):
            shown.append(joined(text(f"eval {name}", "dim"), *parts))
    return shown


# --- weights ---


UPDATES = (
    Column("replica", lambda line: text(str(line.get("replica", ""))), width=11),
    Column("by", lambda line: text(str(line.get("weights/transport", "")), "dim"), width=6),
    number("v", lambda line: line.get("weights/version"), width=4),
    number("stage", lambda line: number_in(line, "weights/stage_s"), duration, width=6),
    number("pause", lambda line: number_in(line, "weights/pause_s"), duration, width=6),
    number("load", lambda line: number_in(line, "weights/load_s"), duration, width=6),
    number("stall", lambda line: number_in(line, "weights/stall_s"), duration, width=6),
    number("bytes", lambda line: number_in(line, "weights/bytes"), size, width=7),
    number("read", lambda line: number_in(line, "weights/encoded_bytes"), size, width=7),
)


def weights(view: SnapshotView, choice: Choice) -> Pane:
    """The newest version, and the newest updates of replicas."""
    # A step that publishes nothing has 0, so it is left out.
    idle = [seconds for line in view.snapshot.train if (seconds := number_in(line, "time/publish_s"))]
    again, updates = view.number("rollout/reprefill_tokens"), view.number("weights/updates")
    failures = view.counted("parameter_server", "weights/updates_failed")
    prefilled = count(again / updates if again is not None and updates else None)
    head = [
        joined(
            labelled("learner idle", duration(idle[-1] if idle else None)),
            labelled("gather", duration(view.number("weights/gather_s"))),
            labelled("published", size(view.number("weights/publish_bytes"))),
        ),
        joined(
            labelled("behind", count(view.behind[0] if view.behind else None)),
            labelled("paused", count(view.level("parameter_server", "weights/replicas_paused"))),
            labelled("failures", count(failures), "bad" if failures else ""),
            labelled("prefilled again", prefilled) + text(" an update", "dim"),
        ),
    ]
    found = view.snapshot.updates
    shown = [
        line
        for line in reversed(found)
        if choice.matches(str(line.get("replica", "")), str(line.get("weights/transport", "")))
    ]
    about = "parameter_server/0"
    if not shown:
        words = f"no update matches {choice.needle}" if found else "no update is reported so far"
        return Pane([*head, text(words, "dim")], about=about)
    return Pane(head, table_of(UPDATES, shown, lambda line: str(line.get("replica", "")), newest_first=True), about)


# --- staleness ---


def staleness(view: SnapshotView, choice: Choice) -> Pane:
    """The working limit, the newest step, and a histogram since the learner started."""
    most, late = view.run.staleness_max, view.number("staleness/late_groups")
    so_far = [(view.counted("learner", f"staleness/late_{word}_groups"), word) for word in ("trained", "masked")]
    words = ", ".join(f"{count(groups)} {word}" for groups, word in so_far if groups)
    head = joined(
        labelled("limit", f"{fixed(staleness_limit(view), 0)} of {most}"),
        labelled(f"step {view.run.step}: mean", fixed(view.number("staleness/token_mean"))),
        labelled("most", fixed(view.number("staleness/token_max"), 0)),
        labelled("late", f"{count(late)} of {view.run.groups_per_step} groups", warn_style(late)),
        labelled("so far", words) if words else NONE,
    )
    histograms = next((actor.histograms for actor in view.of("learner")), {})
    names = ("staleness/tokens", "staleness/groups")
    both = [histograms[name].counts if name in histograms else [] for name in names]
    if not any(both):
        return Pane([head], about="learner/0")
    heads: list[RenderableType] = [text(word, "dim") for word in ("versions", "tokens", "", "", "groups", "", "")]
    # Show the buckets up to the last that holds something, and at least up to that of staleness.max.
    held = max((i for counts in both for i, n in enumerate(counts) if n), default=0)
    last = max(held, bisect_left(edges_of("staleness/tokens"), most))
    numbers = partial(GridColumn, width=5, justify="right")
    bars = [made for _ in both for made in (GridColumn(ratio=1), numbers(), numbers())]
    rows = [heads, *(list(_bucket(both, index, most)) for index in range(last + 1))]
    return Pane([head, grid_of(rows, numbers(width=10), *bars)], about="learner/0")


def _bucket(both: Sequence[Sequence[int]], index: int, most: int) -> Iterator[RenderableType]:
    """The row of a bucket: its versions, and a bar, the number and the share of its tokens and of its groups."""
    edges = edges_of("staleness/tokens")
    # The label has the whole versions in the bucket. An upper edge is inside its bucket.
    low = int(edges[index - 1]) + 1 if index else 0
    high = int(edges[index]) if index < len(edges) else None
    label = f"{low}+" if high is None else f"{low}" if high <= low else f"{low}–{high}"
    # The gate limits all groups together, so a slow group can exceed the limit; staleness.late says what happens to it.
    late = low > most
    yield text(f"late {label}" if late else label, "warn" if late else "dim")
    for counts in both:
        value, whole = counts[index] if index < len(counts) else 0, sum(counts)
        yield level_bar(value, max(counts, default=0), "warn" if late else "level")
        yield text(count(value))
        yield text(percent(value / whole) if whole else "", "dim")


# --- reward, ledger ---

POOL_BAR = 32
"""Cells of the bar of the workers' time."""


def reward(view: SnapshotView, choice: Choice) -> Pane:
    """Tasks of the reward pools. The rate and the shares are recent; times and failures count since the pools began."""
    pools, edges = view.of("reward"), edges_of("reward/run_s")
    kinds, workers = by_kind(view.shares(pools)), sum(len(pool.resources) for pool in view.living("reward"))
    spent = [each.counts for pool in pools if (each := pool.histograms.get("reward/run_s")) is not None]
    counts = [sum(bucket) for bucket in zip(*spent, strict=True)]
    timeouts, killed, failed = (
        view.counted("reward", f"reward/{name}") for name in ("timed_out", "workers_killed", "failed")
    )
    facts = {
        "tasks/s": text(rate(view.rate("reward", "reward/scored"))),
        "workers": text(f"{workers or ABSENT}"),
        "at work": text(percent(kinds.get("work"))),
        "running": text(count(view.level("reward", "reward/running"))),
        "queued": text(count(view.level("reward", "reward/queued"))),
        "time p50": text(_at_most(quantile(counts, edges, 0.5))),
        "time p99": text(_at_most(quantile(counts, edges, 0.99))),
        "timeouts": text(count(timeouts), warn_style(timeouts)),
        "killed": text(count(killed), warn_style(killed)),
        "failed": text(count(failed), "bad" if failed else ""),
    }
    return Pane([state_bar(kinds, POOL_BAR), in_columns(facts)], about="reward/0")


def _at_most(seconds: float | None) -> str:
    """The upper edge of a quantile's bucket in words; "long" for the last bucket, which has no edge."""
    return ABSENT if seconds is None else f"≤ {duration(seconds)}" if seconds < float("inf") else "long"


def ledger(view: SnapshotView, choice: Choice) -> Pane:
    """Prompt groups by outcome, and outstanding groups against the gate."""
    outstanding, gate = (view.level("dataloader", f"tickets/{name}") for name in ("outstanding", "gate"))
    quarantined, rested, left_out = (
        view.of_learner(f"ledger/{name}") for name in ("quarantined", "rested", "left_out")
    )
    facts = {
        "trained": text(exact(view.of_learner("ledger/trained"))),
        "filtered": text(exact(view.of_learner("ledger/filtered"))),
        "quarantined": text(exact(quarantined), "bad" if quarantined else ""),
        "rested": text(exact(rested) if rested else ""),
        "left out": text(exact(left_out) if left_out else ""),
        "outstanding": text(f"{count(outstanding)} of {count(gate)}", warn_style(gate and (outstanding or 0) >= gate)),
        "in the buffer": text(count(view.buffered)),
        "a step takes": text(f"{view.run.groups_per_step} groups"),
    }
    return Pane([in_columns(facts)], about="dataloader/0")


# --- events ---

LONGEST_EVENT = 2000
"""Characters of an event; longer ones are cut."""


def _styled(event: Event, words: str, info: Style = "") -> Text:
    """Words in the style of the event's level; ``info`` is the style of the level info."""
    return text(words, info if event.level == "info" else LEVEL_STYLES.get(event.level, ""))


EVENTS = (
    Column("time", lambda event: text(time.strftime("%m-%d %H:%M:%S", time.localtime(event.wall)), "dim")),
    Column("level", lambda event: _styled(event, event.level, "dim"), width=7),
    Column("actor", lambda event: text(event.actor or "run"), width=9),
    Column("event", lambda event: _styled(event, " ".join(event.text.split())), most=LONGEST_EVENT),
)


def events(view: SnapshotView, choice: Choice) -> Pane:
    """Events of the chosen level and above, the newest first."""
    wanted = LEVELS[LEVELS.index(choice.level) :]
    shown = [
        event
        for event in reversed(view.snapshot.events)
        if (event.level in wanted or event.level not in LEVELS) and choice.matches(event.actor, event.text, event.level)
    ]
    if not shown:
        return Pane([text("no events", "dim")], about=CONTROLLER)
    return Pane(table=table_of(EVENTS, shown, lambda event: event.actor or CONTROLLER, newest_first=True))


# --- all of them ---

PANES: dict[PaneName, Callable[[SnapshotView, Choice], Pane]] = {
    "rollouters": rollouters,
    "learner": learner,
    "weights": weights,
    "staleness": staleness,
    "reward": reward,
    "ledger": ledger,
    "events": events,
    "episodes": episodes,
}
"""The function that makes each pane."""
MOST_SHOWN = {"events": 20, "weights": 8}
"""Most rows in a page."""


def panes_of(view: SnapshotView | None) -> list[PaneName]:
    """The panes of this run: without actors of episodes, and before the first snapshot, all but ``episodes``."""
    has_episodes = view is not None and view.of("episodes")
    return [name for name in PANES if has_episodes or name != "episodes"]


def title(name: PaneName, view: SnapshotView, choice: Choice) -> str:
    """The title of a pane: the level of events, and the number of rollouters and episode hosts that can work."""
    if name == "events" and choice.level != "info":
        return f"events: {choice.level}s" if choice.level == "error" else "events: warnings, errors"
    role = {"rollouters": "rollouter", "episodes": "episodes"}.get(name)
    if role is None or (not (actors := view.of(role)) and role == "episodes"):
        return name
    return f"{name} {sum(view.condition(each) in THERE for each in actors)}/{len(actors)}"


def page(view: SnapshotView, width: int, *, whole: bool = False) -> str:
    """All panes, one below the other, with the newest events and updates; ``whole`` cuts no line to ``width``."""
    choice = Choice()
    drawn = [*lines(header(view), width), NONE, *lines(pipeline(view, width), width)]
    for name in panes_of(view):
        shown = PANES[name](view, choice)
        drawn += [NONE, text(title(name, view, choice).upper()), *lines(Group(*shown.head), width)]
        if shown.table is not None:
            table = replace(shown.table, rows=shown.table.rows[: MOST_SHOWN.get(name)])
            drawn += lines(table, sum(cells for _, cells in table.laid()))
    for line in drawn:
        line.rstrip()
        if not whole:
            line.truncate(width, overflow="ellipsis")
    return "".join(f"{line.plain}\n" for line in drawn)

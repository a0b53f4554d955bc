"""The panes with a row for each actor: the rollouters, and the episodes with their hosts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Column as GridColumn
from rich.table import Table as Grid
from rich.text import Text

from asyncrl.core.numbers import ABSENT, count, duration, fixed, percent
from asyncrl.messages.monitor import ActorView, Shares
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.top.bottleneck import by_kind
from asyncrl.top.draw import (
    Choice,
    Column,
    Pane,
    Row,
    Style,
    Table,
    grid_of,
    is_problem,
    is_there,
    joined,
    labelled,
    level_bar,
    number,
    row,
    state_bar,
    state_text,
    table_of,
    text,
    warn_style,
)
from asyncrl.top.view import AT, UNHEARD, SnapshotView, family, is_gone, mean, now, total, version_of, versions_behind

BAR = 8
"""Cells of a bar in a table."""


class ActorRow(NamedTuple):
    """An actor of a table."""

    view: SnapshotView
    actor: ActorView

    @property
    def condition(self) -> str:
        """Condition as the view shows it."""
        return self.view.condition(self.actor)

    @property
    def bar(self) -> Text:
        """The time of the actor's resources."""
        return state_bar(by_kind(self.view.shares([self.actor])), BAR)

    @property
    def state(self) -> Text:
        """Words for the state."""
        return state_text(*self.view.state(self.actor))

    @property
    def number(self) -> int:
        """The number in ROLE/INDEX."""
        return int(self.actor.name.partition("/")[2])

    def name(self, role: str = "") -> Text:
        """The actor's name; of ``role`` with the first letter alone."""
        name = self.actor.name.replace(f"{role}/", f"{role[0]}/") if role else self.actor.name
        return text(name, "bad" if is_problem(self.condition) else "")

    def there(self, value: float | None) -> float | None:
        """The value, unless the actor is gone."""
        return None if is_gone(self.actor) else value

    def metric(self, name: str) -> float | None:
        """A metric that stays when the actor is gone."""
        return self.actor.metrics.get(name)


HOST = Column(title="host", cell=lambda entry: text(entry.actor.host, "dim"), value=lambda entry: entry.actor.host)


def gauge(name: str) -> Callable[[ActorRow], float | None]:
    """The value of a gauge; None if the actor is gone."""
    return lambda entry: now(entry.actor, name)


# --- rollouters ---


def _restarts(entry: ActorRow) -> float:
    return entry.actor.restarts + (entry.metric("rollout/engine_restarts") or 0.0)


def _oldest(entry: ActorRow) -> float | None:
    return now(entry.actor, "rollout/oldest_s") if now(entry.actor, "rollout/in_flight") else None


def _lag(entry: ActorRow) -> int | None:
    return versions_behind(entry.view.run, entry.actor)


def _drift_style(entry: ActorRow, otherwise: Style = "") -> Style:
    """An update with a drift of drift.warn or more stands out."""
    return warn_style(entry.metric("rollout/drift_warnings"), otherwise)


def _three_digits(value: float | None) -> str:
    return fixed(value, 3)


ROLLOUTERS = (
    Column(title="rollouter", cell=lambda entry: entry.name("rollouter"), value=lambda entry: entry.number, width=9),
    Column(
        title="state", cell=lambda entry: entry.state, value=lambda entry: entry.view.state(entry.actor)[1], width=10
    ),
    Column(title="time", cell=lambda entry: entry.bar, width=BAR),
    number("flight", gauge("rollout/in_flight"), summed=True),
    number("wait", gauge("rollout/waiting"), summed=True),
    number("tok/s", lambda entry: entry.view.rate_of(entry.actor, "rollout/sampled_tokens"), summed=True),
    number(
        "KV",
        gauge("rollout/kv_use"),
        percent,
        lambda entry: warn_style((now(entry.actor, "rollout/kv_use") or 0.0) > 0.95),
        width=4,
    ),
    number("v", lambda entry: version_of(entry.actor), width=3),
    number("lag", _lag, style=lambda entry: warn_style((_lag(entry) or 0) > 1)),
    number("rst", _restarts, style=lambda entry: warn_style(_restarts(entry), "dim")),
    number("oldest", _oldest, duration),
    number("stall", gauge("weights/stall_s"), duration, width=6),
    number("drift", gauge("rollout/drift"), _three_digits, _drift_style, width=6),
    number(
        "worst",
        lambda entry: entry.metric("rollout/drift_largest"),
        _three_digits,
        partial(_drift_style, otherwise="dim"),
        width=6,
    ),
    number("most", gauge("rollout/concurrency"), style=lambda entry: "dim", summed=True),
    HOST,
)
SORTS = {column.title: column.value for column in ROLLOUTERS if column.value is not None}
WORDS = ("rollouter", "host", "state")
"""Columns that are sorted upwards at first; numbers downwards."""


def rollouters(view: SnapshotView, choice: Choice) -> Pane:
    """A row for each rollouter. If rollouters of several hosts are sorted by host, each host has a heading."""
    found = [ActorRow(view, actor) for actor in view.of("rollouter")]
    chosen = [
        entry
        for entry in found
        if choice.matches(
            entry.actor.name,
            entry.name("rollouter").plain,
            entry.actor.host,
            entry.condition,
            view.state(entry.actor)[1],
        )
    ]
    by_host = choice.sort == "host" and len({entry.actor.host for entry in chosen}) > 1
    rows: list[Row] = []
    for host, entries in groupby(_in_order(chosen, choice), key=lambda entry: entry.actor.host if by_host else ""):
        table = table_of(ROLLOUTERS, group := list(entries), lambda entry: entry.actor.name)
        rows += [*([_host_row(host, group)] if by_host else []), *table.rows]
    words = f"no rollouter matches {choice.needle}" if found else "no rollouter is known so far"
    return Pane([] if rows else [text(words, "dim")], Table(ROLLOUTERS, rows))


def sorted_next(choice: Choice) -> Choice:
    """The choice, sorted by the next column: words upwards, numbers downwards."""
    titles = list(SORTS)
    sort = titles[(titles.index(choice.sort) + 1) % len(titles)]
    return replace(choice, sort=sort, descending=sort not in WORDS)


def _in_order(entries: Sequence[ActorRow], choice: Choice) -> list[ActorRow]:
    """In the chosen order; unknown values come last."""
    value = SORTS[choice.sort]
    valued = [(value(entry), entry) for entry in sorted(entries, key=lambda entry: entry.number)]
    known = [each for each in valued if each[0] is not None]
    known.sort(key=lambda each: each[0], reverse=choice.descending)
    return [entry for _, entry in known] + [entry for found, entry in valued if found is None]


def _host_row(host: str, entries: Sequence[ActorRow]) -> Row:
    """The heading of a host: how many of its rollouters can work, and the sums of the columns."""
    conditions = [entry.condition for entry in entries]
    state = f"{sum(map(is_there, conditions))} of {len(entries)}"
    cells = {
        "rollouter": text(host or "host unknown", "bold"),
        "state": text(state, "bad" if any(map(is_problem, conditions)) else "dim"),
    }
    for column in ROLLOUTERS:
        if column.summed and column.value is not None:
            cells[column.title] = text(count(total(map(column.value, entries))), "bold")
    shown = [cells.get(column.title) or text("") for column in ROLLOUTERS]
    return row(entries[0].actor.name, ROLLOUTERS, shown)


# --- episodes ---


def _counted(*names: str) -> Callable[[ActorRow], float | None]:
    return lambda entry: total(map(entry.metric, names))


def _problems(title: str, value: Callable[[ActorRow], float | None], style: Style = "warn") -> Column:
    """A column of numbers that stand out if there are any."""
    return number(title, value, style=lambda entry: style if value(entry) else "")


HOSTS = (
    Column(title="played by", cell=lambda entry: entry.name("episodes")),
    Column(title="state", cell=lambda entry: state_text(entry.condition, "", ""), width=6),
    Column(title="time", cell=lambda entry: entry.bar, width=BAR),
    number("workers", lambda entry: entry.there(len(entry.actor.resources) or None)),
    number("open", gauge("episodes/open")),
    _problems("wait", gauge("episodes/waiting")),
    number("played", _counted("episodes/played")),
    _problems("failed", _counted("episodes/failed"), "bad"),
    number("tools", _counted("episodes/tool_calls")),
    _problems("errors", _counted("episodes/tool_errors", "episodes/tool_mistakes")),
    _problems("lost", _counted("episodes/workers_killed", "episodes/workers_died")),
    number("rst", lambda entry: entry.actor.restarts, style=lambda entry: warn_style(entry.actor.restarts, "dim")),
    HOST,
)


def episodes(view: SnapshotView, choice: Choice) -> Pane:
    """Open episodes by stage, how earlier ones ended, and a row for each host."""
    hosts = view.of("episodes")
    if not hosts:
        return Pane([text("each prompt has a single response: there are no episodes", "dim")])
    chosen = [ActorRow(view, each) for each in hosts if choice.matches(each.name, each.host, view.condition(each))]
    at, shares = family(view.living("rollouter"), AT), _shares(view)
    names = sorted({*at, *shares}, key=lambda name: (-at.get(name, 0.0), -shares.get(name, 0.0), name))
    head = [*_summary(view, {name: at[name] for name in names if name in at}), _stages(names, at, shares)]
    return Pane(head if names else head[:-1], table_of(HOSTS, chosen, lambda entry: entry.actor.name))


def _summary(view: SnapshotView, at: Mapping[str, float]) -> list[RenderableType]:
    """Three lines: the open episodes, their turns and context, and how episodes ended."""
    living, rollouters = view.living("rollouter"), view.of("rollouter")
    open_count = view.level("rollouter", "rollout/episodes")
    oldest = max((actor.metrics.get("rollout/episodes_oldest_s", 0.0) for actor in living), default=None)
    turns, prompts = view.histogram("rollouter", "rollout/turns"), view.histogram("rollouter", "rollout/prompt_tokens")
    p95 = quantile(turns[0], edges_of("rollout/turns"), 0.95)
    cost = mean(actor.metrics.get("rollout/cost_factor") for actor in rollouters)
    malformed = view.counted("rollouter", "rollout/malformed_calls")
    failed = family(rollouters, "rollout/episodes_failed/")
    stages = ", ".join(f"{count(number)} {name}" for name, number in at.items())
    words = f"{count(open_count)} episodes" + (f": {stages}" if stages else "")
    return [
        joined(labelled("oldest", duration(oldest if open_count else None)), text(words, "bold")),
        joined(
            labelled("turns", fixed(_mean(turns), 1)),
            labelled("p95", ABSENT if p95 is None else f"≤ {p95:g}" if p95 < float("inf") else "many"),
            labelled("context", f"{count(_mean(prompts))} tokens"),
            labelled("cost", fixed(cost), warn_style((cost or 0.0) > 2)),
            labelled("prefilled again", count(view.counted("rollouter", "rollout/reprefill_tokens"))),
            labelled("malformed calls", count(malformed), warn_style(malformed)),
        ),
        joined(
            labelled("ended", _counts(family(rollouters, "rollout/episodes_ended/"))),
            labelled("failed", _counts(failed), "bad" if failed else ""),
            labelled("forks", _counts(family(rollouters, "rollout/forks/"))),
        ),
    ]


def _counts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _mean(seen: tuple[list[int], float]) -> float | None:
    counts, whole = seen
    return whole / sum(counts) if sum(counts) else None


def _shares(view: SnapshotView) -> Shares:
    """Shares of the time of episodes that ended in the window, by stage; without an older snapshot, of all ended ones.

    Actors that are not heard (UNHEARD) are left out.
    """
    spent: dict[str, float] = {}
    for actor in view.of("rollouter"):
        if actor.condition in UNHEARD:
            continue
        before = view.steps.before(actor)
        earlier = family([before], "rollout/episode_s/") if before is not None else {}
        for stage, seconds in family([actor], "rollout/episode_s/").items():
            spent[stage] = spent.get(stage, 0.0) + max(0.0, seconds - earlier.get(stage, 0.0))
    whole = sum(spent.values())
    return {stage: seconds / whole for stage, seconds in spent.items() if seconds > 0} if whole > 0 else {}


def _stages(names: Sequence[str], at: Mapping[str, float], shares: Shares) -> Grid:
    """A row for each stage: its open episodes, and its share of the time of ended ones."""
    heads: list[RenderableType] = [text(word, "dim") for word in ("stage", "open", "time")]
    rows: list[list[RenderableType]] = [
        [
            text(name, "bold" if at.get(name) else "dim"),
            text(count(at.get(name))),
            text(percent(shares.get(name))),
            level_bar(shares.get(name), 1.0),
        ]
        for name in names
    ]
    numbers = partial(GridColumn, width=5, justify="right")
    return grid_of([heads, *rows], GridColumn(min_width=12, max_width=32), numbers(), numbers(), GridColumn())

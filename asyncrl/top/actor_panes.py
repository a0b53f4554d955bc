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

from asyncrl.core.formatting import ABSENT, count, duration, fixed, percent
from asyncrl.messages.monitor import ActorView, Shares
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.top.bottleneck import by_kind
from asyncrl.top.draw import (
    PROBLEMS,
    THERE,
    Choice,
    Column,
    Pane,
    Row,
    Style,
    Table,
    grid_of,
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
from asyncrl.top.view import AT, UNHEARD, SnapshotView, family, is_gone, mean, total, version_of, versions_behind

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
        """A bar of the time of the actor's resources, by kinds of states."""
        return state_bar(by_kind(self.view.shares([self.actor])), BAR)

    @property
    def state(self) -> Text:
        """Words for the state."""
        return state_text(*self.view.state(self.actor))

    def name(self, role: str = "") -> Text:
        """The actor's name; with ``role``, only the first letter of the role stays: r/3 for rollouter/3."""
        name = self.actor.name.replace(f"{role}/", f"{role[0]}/") if role else self.actor.name
        return text(name, "bad" if self.condition in PROBLEMS else "")

    def there(self, value: float | None) -> float | None:
        """The value, unless the actor is gone."""
        return None if is_gone(self.actor) else value

    def metric(self, name: str) -> float | None:
        """The value of a metric, also when the actor is gone; None if it is unknown."""
        return self.actor.metrics.get(name)


def rows_of(view: SnapshotView, role: str, choice: Choice) -> list[ActorRow]:
    """The actors of a role that the choice shows, in their order."""
    rows = [ActorRow(view, actor) for actor in view.of(role)]
    words = [(each.actor.name, each.name(role).plain, each.actor.host, *view.state(each.actor)[:2]) for each in rows]
    return [each for each, texts in zip(rows, words, strict=True) if choice.matches(*texts)]


HOST = Column("host", lambda entry: text(entry.actor.host, "dim"), lambda entry: entry.actor.host)


def _counted(*names: str) -> Callable[[ActorRow], float | None]:
    """A function that adds up these counters of an actor."""
    return lambda entry: total(map(entry.metric, names))


def gauge(name: str) -> Callable[[ActorRow], float | None]:
    """A function that reads this gauge of an actor; None if the actor is gone."""
    return lambda entry: entry.there(entry.metric(name))


# --- rollouters ---


def _drift(title: str, name: str, otherwise: Style = "") -> Column:
    """A column of a drift in nats. It stands out once any update of the rollouter had a drift of drift.warn or more."""

    def cell(entry: ActorRow) -> Text:
        return text(fixed(value(entry), 3), warn_style(entry.metric("rollout/drift_warnings"), otherwise))

    value = gauge(name)
    return Column(title, cell, value, right=True, width=6)


def _restarts(entry: ActorRow) -> float:
    """Restarts of the rollouter's process and of its engine, added up."""
    return entry.actor.restarts + (entry.metric("rollout/engine_restarts") or 0.0)


ROLLOUTERS = (
    Column(
        "rollouter",
        lambda entry: entry.name("rollouter"),
        lambda entry: int(entry.actor.name.partition("/")[2]),
        width=9,
    ),
    Column("state", lambda entry: entry.state, lambda entry: entry.state.plain, width=10),
    Column("time", lambda entry: entry.bar, width=BAR),
    number("flight", gauge("rollout/in_flight"), summed=True),
    number("wait", gauge("rollout/waiting"), summed=True),
    number("tok/s", lambda entry: entry.view.rate_of(entry.actor, "rollout/sampled_tokens"), summed=True),
    number("KV", gauge("rollout/kv_use"), percent, lambda share: warn_style(share > 0.95), width=4),
    number("v", lambda entry: version_of(entry.actor), width=3),
    number("lag", lambda entry: versions_behind(entry.view.run, entry.actor), style=lambda lag: warn_style(lag > 1)),
    number("rst", _restarts, style=lambda times: warn_style(times, "dim")),
    number("oldest", gauge("rollout/oldest_s"), lambda seconds: duration(seconds or None)),
    number("stall", gauge("weights/stall_s"), duration, width=6),
    _drift("drift", "rollout/drift"),
    _drift("worst", "rollout/drift_largest", "dim"),
    number("most", gauge("rollout/concurrency"), style=lambda limit: "dim", summed=True),
    HOST,
)
SORTS = {column.title: column.value for column in ROLLOUTERS if column.value is not None}


def rollouters(view: SnapshotView, choice: Choice) -> Pane:
    """A row for each rollouter. If rollouters of several hosts are sorted by host, each host has a heading."""
    chosen = rows_of(view, "rollouter", choice)
    by_host = choice.sort == "host" and len({entry.actor.host for entry in chosen}) > 1
    rows: list[Row] = []
    for host, entries in groupby(_in_order(chosen, choice), key=lambda entry: entry.actor.host if by_host else ""):
        table = table_of(ROLLOUTERS, group := list(entries), lambda entry: entry.actor.name)
        rows += [*([_host_row(host, group)] if by_host else []), *table.rows]
    words = f"no rollouter matches {choice.needle}" if view.of("rollouter") else "no rollouter is known so far"
    return Pane([] if rows else [text(words, "dim")], Table(ROLLOUTERS, rows))


def sorted_next(choice: Choice) -> Choice:
    """The choice, sorted by the next column: words upwards, numbers downwards."""
    titles = list(SORTS)
    sort = titles[(titles.index(choice.sort) + 1) % len(titles)]
    return replace(choice, sort=sort, descending=sort not in ("rollouter", "state", "host"))


def _in_order(entries: Sequence[ActorRow], choice: Choice) -> list[ActorRow]:
    """In the chosen order; unknown values come last."""
    value = SORTS[choice.sort]
    known = [entry for entry in entries if value(entry) is not None]
    return sorted(known, key=value, reverse=choice.descending) + [each for each in entries if value(each) is None]


def _host_row(host: str, entries: Sequence[ActorRow]) -> Row:
    """The heading of a host: how many of its rollouters can work, and the sums of the columns."""
    conditions = [entry.condition for entry in entries]
    state = f"{sum(each in THERE for each in conditions)} of {len(entries)}"
    cells = {
        "rollouter": text(host or "host unknown", "bold"),
        "state": text(state, "bad" if any(each in PROBLEMS for each in conditions) else "dim"),
    }
    for column in ROLLOUTERS:
        if column.summed and column.value is not None:
            cells[column.title] = text(count(total(map(column.value, entries))), "bold")
    shown = [cells.get(column.title) or text("") for column in ROLLOUTERS]
    return row(entries[0].actor.name, ROLLOUTERS, shown)


# --- episodes ---


HOSTS = (
    Column("played by", lambda entry: entry.name("episodes")),
    Column("state", lambda entry: state_text(entry.condition, "", ""), width=6),
    Column("time", lambda entry: entry.bar, width=BAR),
    number("workers", lambda entry: entry.there(len(entry.actor.resources) or None)),
    number("open", gauge("episodes/open")),
    number("wait", gauge("episodes/waiting"), style=warn_style),
    number("played", _counted("episodes/played")),
    number("failed", _counted("episodes/failed"), style=lambda times: "bad" if times else ""),
    number("tools", _counted("episodes/tool_calls")),
    number("errors", _counted("episodes/tool_errors", "episodes/tool_mistakes"), style=warn_style),
    number("lost", _counted("episodes/workers_killed", "episodes/workers_died"), style=warn_style),
    number("rst", lambda entry: entry.actor.restarts, style=lambda times: warn_style(times, "dim")),
    HOST,
)


def episodes(view: SnapshotView, choice: Choice) -> Pane:
    """Open episodes by stage, how earlier ones ended, and a row for each host."""
    if not view.of("episodes"):
        return Pane([text("each prompt has a single response: there are no episodes", "dim")])
    at, shares = family(view.living("rollouter"), AT), _shares(view)
    names = sorted({*at, *shares}, key=lambda name: (-at.get(name, 0.0), -shares.get(name, 0.0), name))
    head = [*_summary(view), *([_stages(names, at, shares)] if names else [])]
    return Pane(head, table_of(HOSTS, rows_of(view, "episodes", choice), lambda entry: entry.actor.name))


def _summary(view: SnapshotView) -> list[RenderableType]:
    """Two lines: the open episodes with their turns and context, and how episodes ended."""
    living, rollouters = view.living("rollouter"), view.of("rollouter")
    open_count = view.level("rollouter", "rollout/episodes")
    oldest = max((actor.metrics.get("rollout/episodes_oldest_s", 0.0) for actor in living), default=None)
    turns, prompts = view.histogram("rollouter", "rollout/turns"), view.histogram("rollouter", "rollout/prompt_tokens")
    p95 = quantile(turns[0], edges_of("rollout/turns"), 0.95)
    cost = mean(actor.metrics.get("rollout/cost_factor") for actor in rollouters)
    malformed = view.counted("rollouter", "rollout/malformed_calls")
    failed = family(rollouters, "rollout/episodes_failed/")
    return [
        joined(
            text(f"{count(open_count)} episodes", "bold"),
            labelled("oldest", duration(oldest if open_count else None)),
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
    """Counts with their names as text: "12 stop, 3 length"."""
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _mean(seen: tuple[list[int], float]) -> float | None:
    """Mean of the values of a histogram, given its counts by bucket and its sum; None without values."""
    counts, whole = seen
    return whole / sum(counts) if sum(counts) else None


def _shares(view: SnapshotView) -> Shares:
    """Shares of the time of episodes that ended in the window, by stage; without an older snapshot, of all ended ones.

    Actors that are not heard (UNHEARD) are left out.
    """
    heard = [actor for actor in view.of("rollouter") if actor.condition not in UNHEARD]
    earlier = family(filter(None, map(view.steps.before, heard)), "rollout/episode_s/")
    found = family(heard, "rollout/episode_s/")
    spent = {stage: seconds - earlier.get(stage, 0.0) for stage, seconds in found.items()}
    whole = sum(spent.values())
    return {stage: seconds / whole for stage, seconds in spent.items() if seconds > 0}


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

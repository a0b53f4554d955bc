"""The pane of episodes: open episodes by stage, how earlier ones ended, and a row for each episode host. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from asyncrl.core.numbers import ABSENT, count, duration, fixed, percent
from asyncrl.messages.snapshot import ActorView
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.observe.snapshots.rates import Shares, mean, total
from asyncrl.top.bottleneck import by_kind
from asyncrl.top.draw import (
    Choice,
    Column,
    Line,
    Pane,
    Span,
    Style,
    fitting,
    is_amiss,
    joined,
    level_bar,
    number,
    said,
    said_state,
    state_bar,
    table_of,
    warned,
)
from asyncrl.top.view import AT, UNHEARD, View, family, is_gone, now

STAGE_WIDTH = 32
SHARE_BAR = 24
BAR = 8
"""Cells of a bar in a table."""
Entry = tuple[View, ActorView]


# --- cells of tables of actors ---


def name_of(entry: Entry, role: str) -> Span:
    """An actor's name; of ``role`` with the first letter alone."""
    view, actor = entry
    name = actor.name.replace(f"{role}/", f"{role[0]}/") if role else actor.name
    return name, "bad" if is_amiss(view.condition(actor)) else ""


def bar_of(entry: Entry) -> Line:
    """The time of an actor's resources."""
    view, actor = entry
    return state_bar(by_kind(view.shares([actor])), BAR)


def gauge(name: str) -> Callable[[Entry], float | None]:
    """The value of a gauge; None if the actor is gone."""
    return lambda entry: now(entry[1], name)


def there(value: float | None, entry: Entry) -> float | None:
    """The value, unless the actor is gone."""
    return None if is_gone(entry[1]) else value


def _counted(*names: str) -> Callable[[Entry], float | None]:
    return lambda entry: total(entry[1].metrics.get(name) for name in names)


def _warned_of(value: Callable[[Entry], float | None]) -> Callable[[Entry], Style]:
    return lambda entry: warned(value(entry))


_tool_errors = _counted("episodes/tool_errors", "episodes/tool_mistakes")
_lost_workers = _counted("episodes/workers_killed", "episodes/workers_died")
HOSTS = (
    Column(title="played by", cell=partial(name_of, role="episodes"), width=9),
    Column(title="host", cell=lambda entry: (entry[1].host, "dim"), drop=3, most=16),
    Column(title="state", cell=lambda entry: said_state(entry[0].condition(entry[1]), "", ""), width=6, most=12),
    Column(title="time", cell=bar_of, width=8, drop=4),
    number("workers", lambda entry: there(len(entry[1].resources) or None, entry), drop=1),
    number("open", gauge("episodes/open"), width=4),
    number("wait", gauge("episodes/waiting"), style=_warned_of(gauge("episodes/waiting")), width=4, drop=2),
    number("played", _counted("episodes/played")),
    number(
        "failed",
        _counted("episodes/failed"),
        style=lambda entry: "bad" if entry[1].metrics.get("episodes/failed") else "",
    ),
    number("tools", _counted("episodes/tool_calls"), width=5, drop=5),
    number("errors", _tool_errors, style=_warned_of(_tool_errors), drop=6),
    number("lost", _lost_workers, style=_warned_of(_lost_workers), drop=7),
    number(
        "rst",
        lambda entry: entry[1].restarts,
        style=lambda entry: warned(entry[1].restarts, "dim"),
        width=3,
        drop=8,
    ),
)


# --- the pane ---


def episodes(view: View, choice: Choice, width: int) -> Pane:
    """Open episodes by stage, how earlier ones ended, and a row for each host."""
    hosts = view.of("episodes")
    if not hosts:
        return Pane([[("each prompt has a single response: there are no episodes", "dim")]])
    chosen = [(view, each) for each in hosts if choice.matches(each.name, each.host, view.condition(each))]
    at, shares = family(view.living("rollouter"), AT), _shares(view)
    names = sorted({*at, *shares}, key=lambda name: (-at.get(name, 0.0), -shares.get(name, 0.0), name))
    names = [name for name in names if at.get(name) or shares.get(name)]
    head = [*_summary(view, width, {name: at[name] for name in names if at.get(name)}), *_stages(names, at, shares)]
    return Pane(head, table_of(HOSTS, chosen, lambda entry: entry[1].name))


def _summary(view: View, width: int, at: Mapping[str, float]) -> list[Line]:
    living, rollouters = view.living("rollouter"), view.of("rollouter")
    open = view.level("rollouter", "rollout/episodes")
    oldest = max((actor.metrics.get("rollout/episodes_oldest_s", 0.0) for actor in living), default=None)
    turns, prompts = view.histogram("rollouter", "rollout/turns"), view.histogram("rollouter", "rollout/prompt_tokens")
    p95 = quantile(turns[0], edges_of("rollout/turns"), 0.95)
    cost = mean(actor.metrics.get("rollout/cost_factor") for actor in rollouters)
    malformed = view.counted("rollouter", "rollout/malformed_calls")
    failed = family(rollouters, "rollout/episodes_failed/")
    stages = ", ".join(f"{count(number)} {name}" for name, number in at.items())
    return [
        joined(
            [
                said("oldest", duration(oldest if open else None)),
                [(f"{count(open)} episodes" + (f": {stages}" if stages else ""), "bold")],
            ]
        ),
        fitting(
            [
                said("turns", fixed(_mean(turns), 1)),
                said("p95", ABSENT if p95 is None else f"≤ {p95:g}" if p95 < float("inf") else "many"),
                said("context", f"{count(_mean(prompts))} tokens"),
                said("cost", fixed(cost), warned((cost or 0.0) > 2)),
                said("prefilled again", count(view.counted("rollouter", "rollout/reprefill_tokens"))),
                said("malformed calls", count(malformed), warned(malformed)),
            ],
            width,
        ),
        fitting(
            [
                said("ended", _counts(family(rollouters, "rollout/episodes_ended/"))),
                said("failed", _counts(failed), "bad" if failed else ""),
                said("forks", _counts(family(rollouters, "rollout/forks/"))),
            ],
            width,
        ),
    ]


def _counts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in found.items()) or "0"


def _mean(seen: tuple[list[int], float]) -> float | None:
    counts, whole = seen
    return whole / sum(counts) if sum(counts) else None


def _shares(view: View) -> Shares:
    """Shares of the time of episodes that ended in the window, by stage."""
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


def _stages(names: list[str], at: Mapping[str, float], shares: Shares) -> list[Line]:
    """A title, and a line for each stage: its open episodes, and its share of the time of ended ones."""
    if not names:
        return []
    wide = min(STAGE_WIDTH, max(12, *map(len, names)))
    lines: list[Line] = [[(f"{'stage':<{wide}}   open  time", "dim")]]
    for name in names:
        open, share = at.get(name), shares.get(name)
        bar = level_bar(share or 0.0, 1.0, SHARE_BAR)
        lines.append(
            [
                (f"{name[:wide]:<{wide}}", "bold" if open else "dim"),
                (f"  {count(open):>5}  {percent(share):>4}  ", ""),
                *bar,
            ]
        )
    return lines

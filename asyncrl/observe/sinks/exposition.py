"""Metrics of a run as families of Prometheus, with names and labels. Pure.

``reward/mean`` becomes ``asyncrl_reward_mean``. Labels distinguish actor and host, replica, evaluation, component and
stage. Kinds and descriptions come from the catalogue. Invariant: a family has one kind; if two names of a run map to
one, the last value counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.snapshot import ActorView, Histogram, Snapshot
from asyncrl.observe import catalogue
from asyncrl.observe.catalogue import Metric
from asyncrl.observe.sinks.entries import numbers, run_values

Labels = tuple[tuple[str, str], ...]
LABELS = {
    "reward/component/": "component",
    "rollout/episodes_at/": "stage",
    "rollout/episode_s/": "stage",
    "rollout/episode_share/": "stage",
    "rollout/episodes_ended/": "outcome",
    "rollout/episodes_failed/": "cause",
    "rollout/forks/": "cause",
}
"""Label by the prefix of a name; the rest of the name is its value."""
EVAL_LABELS = {"component": "component", "pass_at": "k"}
"""Label of an evaluation's number with members, by its name."""
GAUGES = {
    "version": ("version", "newest version of the weights that it knows"),
    "heard_s": ("heard_s", "age of its last heartbeat"),
    # loop/lag_s is a histogram.
    "loop_lag_s": ("loop_lag_max_s", "largest lag of its event loop since the last heartbeat"),
    "loop_busy": ("loop_busy", "share of time in which its event loop's thread used a processor"),
    "cpu": ("cpu", "processors used by it and its children"),
    "rss_bytes": ("rss_bytes", "memory of it and its children"),
}
"""Name and description of a gauge by field of an ActorView."""


@dataclass(slots=True)
class Family:
    """The values of one name. ``edges`` are those of a histogram."""

    kind: str
    text: str
    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, Histogram] = field(default_factory=dict)
    edges: tuple[float, ...] = ()


def prometheus_name(name: str) -> str:
    """The name of a metric in Prometheus."""
    return "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def families_of(lines: Iterable[Mapping[str, Any]], snapshot: Snapshot | None) -> dict[str, Family]:
    """Families by name, from the newest line of each kind, evaluation and replica, and from the newest snapshot.

    Replicas that have left the run are left out.
    """
    found = _Families()
    there = {actor.name for actor in snapshot.actors} if snapshot is not None else None
    for line in lines:
        if line.get("kind") != "update" or there is None or line.get("replica") in there:
            _add_line(found, line)
    if snapshot is not None:
        found.add("run/phase", 1.0, "1 for the present phase", phase=snapshot.run.phase)
        for name, value in run_values(snapshot).items():
            found.add(name, value, "of the run as a whole")
        for actor in snapshot.actors:
            _add_actor(found, actor)
    return found.by_name


class _Families:
    def __init__(self) -> None:
        self.by_name: dict[str, Family] = {}

    def add(self, name: str, value: float, text: str, *, kind: str = "gauge", **labels: str) -> None:
        family = self._family(name, Family(kind, text))
        family.values[tuple(sorted(labels.items()))] = float(value)

    def add_histogram(self, name: str, value: Histogram, metric: Metric, **labels: str) -> None:
        if len(value.counts) == len(metric.edges) + 1:
            made = Family("histogram", metric.text, edges=metric.edges)
            family = self._family(name, made)
            family.histograms[tuple(sorted(labels.items()))] = value

    def _family(self, name: str, made: Family) -> Family:
        family = self.by_name.setdefault(prometheus_name(name), made)
        assert family.kind == made.kind, f"{name} is a {made.kind}, and its name that of a {family.kind}"
        return family


def _add_line(found: _Families, line: Mapping[str, Any]) -> None:
    kind = line.get("kind")
    if kind == "train":
        found.add("step", float(line.get("step", 0)), _text("step"))
    for name, value in numbers(dict(line)):
        if kind == "update":
            found.add(f"update/{name.rpartition('/')[2]}", value, _text(name), replica=str(line.get("replica", "")))
        elif kind == "eval" and name.startswith("eval/"):
            evaluation, _, figure = name.removeprefix("eval/").partition("/")
            figure, _, member = figure.partition("/")
            # ``eval/*/pass_at`` and ``pass_at_k`` are two names.
            labels = {EVAL_LABELS.get(figure, "of"): member} if member else {}
            found.add(f"eval/{figure}", value, _text(name), eval=evaluation, **labels)
        elif kind == "train":
            family, labels = _labelled(name)
            found.add(family, value, _text(name), **labels)


def _add_actor(found: _Families, actor: ActorView) -> None:
    who = {"actor": actor.name, "host": actor.host}
    found.add("actor/up", actor.condition == "ready", "whether it is ready", **who)
    found.add("actor/restarts", actor.restarts, "of the actor", kind="counter", **who)
    for field_name, (name, text) in GAUGES.items():
        found.add(f"actor/{name}", getattr(actor, field_name), text, **who)
    for name, value in actor.metrics.items():
        metric = catalogue.find(name)
        kind = "counter" if metric is not None and "counter" in metric.kinds else "gauge"
        family, labels = _labelled(name)
        found.add(f"actor/{family}", value, _text(name), kind=kind, **labels, **who)
    for name, histogram in actor.histograms.items():
        metric = catalogue.find(name)
        if metric is not None:
            found.add_histogram(f"actor/{name}", histogram, metric, **who)
    for resource in actor.resources:
        for state, seconds in resource.seconds.items():
            labels = {"resource": resource.name, "state": state, **who}
            found.add("resource/seconds", seconds, "spent in each state", kind="counter", **labels)
    for gpu in actor.gpus:
        if gpu.utilisation is not None:
            found.add("gpu/utilisation", gpu.utilisation, "share of time", gpu=str(gpu.index), **who)
        found.add("gpu/memory_bytes", gpu.memory_bytes, "in use", gpu=str(gpu.index), **who)


def _labelled(name: str) -> tuple[str, dict[str, str]]:
    """The name of the family, and the label of a value in it."""
    for beginning, label in LABELS.items():
        if name.startswith(beginning):
            return beginning[:-1], {label: name.removeprefix(beginning)}
    return name, {}


def _text(name: str) -> str:
    metric = catalogue.find(name)
    return metric.text if metric is not None else name

"""The catalogue of metrics: each metric is declared once, in ``metrics.py`` of the actor's folder that counts it.

A declaration gives a name, a unit and a sentence. It also names the actors that report the metric, and the kinds of
lines in metrics.jsonl that contain it. ``find`` imports the declarations of all roles, which import nothing but this
module. ``python -m asyncrl.observe.catalogue`` prints docs/metrics.md.

Invariant: a name has one declaration. ``find`` returns None for an unknown name; metrics.py turns that into an error
in tests.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache, partial
from typing import Literal, NamedTuple

from asyncrl.core.roles import ROLES

Kind = Literal["counter", "gauge", "histogram", "line"]
"""In heartbeats a counter is cumulative since the actor's start, and a histogram counts values by bucket. "line" stands
for a key of metrics.jsonl."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SHORT = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0)
TOKENS = tuple(float(1 << power) for power in range(4, 19))
TURNS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0)


class Metric(NamedTuple):
    """A declared metric."""

    name: str
    """GROUP/NAME. ``*`` stands for a name from the configuration, the reward function or the text."""
    kinds: tuple[Kind, ...]
    unit: str
    where: str
    """The actors that have the metric; for a key of metrics.jsonl the kinds of lines that have it."""
    text: str
    edges: tuple[float, ...] = ()
    """Upper edges of a histogram's buckets. A value equal to an edge is in the bucket below that edge. One more bucket,
    above the last edge, is open."""


_metrics: dict[str, Metric] = {}


class Declaring:
    """Declares metrics of ``actor``, or keys of these kinds of ``lines`` in metrics.jsonl."""

    def __init__(self, actor: str = "", *, lines: str = "") -> None:
        self._actor, self._lines = actor, lines
        self.counter = partial(self._declare, "counter")
        self.gauge = partial(self._declare, "gauge")
        self.line = partial(self._declare, "line")

    def histogram(self, name: str, unit: str, text: str, edges: tuple[float, ...]) -> str:
        """Declare a histogram with these upper edges of buckets."""
        return self._declare("histogram", name, unit, text, edges=edges)

    def _declare(
        self, kind: Kind, name: str, unit: str, text: str, *, lines: str = "", edges: tuple[float, ...] = ()
    ) -> str:
        """Declare a metric and return its name. ``lines`` are the kinds of lines that have the metric too."""
        where = "; ".join(filter(None, (self._actor, lines or self._lines)))
        metric = Metric(name, (kind, "line") if lines else (kind,), unit, where, text, edges)
        assert _metrics.setdefault(name, metric) == metric, f"{name} is declared twice"
        return name


@cache
def _import_declarations() -> None:
    """Import ``metrics.py`` of asyncrl/rpc and of each role's folder, once."""
    folders = (role.implementation.partition(":")[0].removesuffix(".actor") for role in ROLES.values())
    for name in (f"{folder}.metrics" for folder in ("asyncrl.rpc", *folders)):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # An actor without metrics of its own needs no such module.
            if error.name != name:
                raise


@cache
def _families() -> tuple[Metric, ...]:
    return tuple(metric for metric in _metrics.values() if metric.name.endswith("/*"))


def every() -> list[Metric]:
    """All metrics by name."""
    _import_declarations()
    return sorted(_metrics.values(), key=lambda metric: metric.name)


def find(name: str) -> Metric | None:
    """Find the metric of this name, or the declaration with ``*`` that covers it; None if it is not declared."""
    _import_declarations()
    if (metric := _metrics.get(name)) is not None:
        return metric
    group, _, rest = name.partition("/")
    if group == "eval":
        # The form is eval/EVALUATION/NUMBER, or eval/EVALUATION/NUMBER/MEMBER.
        _, _, rest = rest.partition("/")
        number, _, member = rest.partition("/")
        return _metrics.get(f"eval/*/{number}/*" if member else f"eval/*/{number}")
    return next((metric for metric in _families() if name.startswith(metric.name[:-1])), None)


def edges_of(name: str) -> tuple[float, ...]:
    """Upper edges of a histogram's buckets. Raises KeyError for an unknown name."""
    _import_declarations()
    return _metrics[name].edges


def quantile(counts: list[int], edges: tuple[float, ...], share: float) -> float | None:
    """Return the upper edge of the bucket that holds the quantile ``share`` (0 to 1).

    ``counts`` has the number of values in each bucket. The last bucket has no upper edge: for it the result is inf.
    None without values.
    """
    total = sum(counts)
    if not total:
        return None
    seen = 0
    for count, edge in zip(counts, edges, strict=False):
        seen += count
        if seen >= share * total:
            return edge
    return float("inf")


HEAD = """\
# Metrics

This page lists every number that asyncrl measures, for example `reward/mean` in a `train` line of `metrics.jsonl`.
`python -m asyncrl.observe.catalogue > docs/metrics.md` writes it from the declarations; do not edit it.

Actors send counters, gauges and histograms to the controller with their heartbeats. Counters and histograms count from
the start of the process. `asyncrl-top` shows them, and snapshots in `monitor/` record them. A metric of kind `line` is
a key of `metrics.jsonl`. An unknown value is absent, never 0. `*` stands for a name from the configuration or the
reward function, or for a name that the description lists.

| name | kind | unit | where | description |
|---|---|---|---|---|"""


def document() -> str:
    """Make the text of docs/metrics.md."""
    metrics = every()
    rows = [HEAD]
    rows += [
        f"| `{metric.name}` | {', '.join(metric.kinds)} | {metric.unit} | {metric.where} | {metric.text} |"
        for metric in metrics
    ]
    rows += [
        "",
        "## Buckets",
        "",
        "Upper edges of each histogram's buckets. An edge belongs to the bucket below it; one more bucket is open.",
        "",
        "| histogram | edges |",
        "|---|---|",
        *(f"| `{m.name}` | {' '.join(f'{edge:g}' for edge in m.edges)} |" for m in metrics if m.edges),
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    # Declarations register with the imported module, not with __main__.
    sys.stdout.write(importlib.import_module("asyncrl.observe.catalogue").document())

"""The catalogue of metrics, and the counters, gauges and histograms of one actor.

Each metric is declared once, in the module ``metrics`` of the folder that counts it. A declaration gives a name, a unit
and a sentence. It also names the actors that report the metric, and the kinds of lines in metrics.jsonl that contain
it. ``find`` imports the declarations of all roles and of rpc, which import nothing but this module.
``python -m asyncrl.observe.catalogue`` prints docs/metrics.md.

Invariants: a name has one declaration. A name that is not declared raises AssertionError if ``strict`` is set, as in
the tests; otherwise it counts like any other. A histogram must always be declared, because the declaration has its
buckets: else it raises KeyError, if ``strict`` is not set. Other threads may read what an actor counts.
"""

from __future__ import annotations

import importlib
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from asyncrl.core.roles import ROLES
from asyncrl.messages.monitor import Histogram

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
    """GROUP/NAME, or NAME alone. ``*`` stands for a name from the configuration, the reward function or the text."""
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
    """The declarations whose last part is ``*``."""
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
    if group in ("eval", "source"):
        # The form is eval/EVALUATION/NUMBER, or eval/EVALUATION/NUMBER/MEMBER; likewise for the sources of a mixture.
        _, _, rest = rest.partition("/")
        number, _, member = rest.partition("/")
        return _metrics.get(f"{group}/*/{number}/*" if member else f"{group}/*/{number}")
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


# --- the metrics of an actor ---

STRICT_VARIABLE = "ASYNCRL_STRICT_METRICS"
strict = bool(os.environ.get(STRICT_VARIABLE))
"""Whether each name must be declared."""


def check_name(name: str, kind: str = "") -> None:
    """If ``strict`` is set, raise AssertionError for a name that is not declared, or not as this ``kind``."""
    if strict:
        metric = find(name)
        assert metric is not None, f"{name} is not declared (metrics.py of the actor's folder)"
        assert not kind or kind in metric.kinds, f"{name} is declared as {metric.kinds} and not as {kind}"


class Counters(dict[str, float]):
    """Counters and gauges of an actor by their names."""

    def __setitem__(self, name: str, value: float) -> None:
        if name not in self:
            check_name(name)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: float = 0.0) -> float:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **named: float) -> None:
        values = dict(*others, **named)
        for name in values.keys() - self.keys():
            check_name(name)
        super().update(values)

    def add(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self[name] = self.get(name, 0) + by


class Histograms:
    """Histograms of an actor by their names."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._edges: dict[str, tuple[float, ...]] = {}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times, in the first bucket whose upper edge is not below it."""
        counts = self._counts.get(name)
        if counts is None:
            counts = self._begin(name)
        counts[bisect_left(self._edges[name], value)] += times
        self._sums[name] += value * times

    def observe_all(self, name: str, values: Iterable[float]) -> None:
        """Count each value."""
        for value in values:
            self.observe(name, value)

    def taken(self) -> dict[str, Histogram]:
        """The histograms that have counted a value."""
        return {name: Histogram(list(counts), self._sums[name]) for name, counts in list(self._counts.items())}

    def _begin(self, name: str) -> list[int]:
        check_name(name, "histogram")
        # Set the sum before the counts, because another thread reads the sum of each histogram that has counts.
        self._sums[name], self._edges[name] = 0.0, edges_of(name)
        counts = self._counts[name] = [0] * (len(self._edges[name]) + 1)
        return counts


# --- docs/metrics.md ---

HEAD = """\
# Metrics

Every metric of a run. `metrics.jsonl` in the run folder has a line for each step, evaluation and weight update, here
shortened:

```json
{"kind": "train", "step": 4, "weights/version": 4, "reward/mean": 0.48, "rollout/length_mean": 38.6}
```

```python
lines = [json.loads(line) for line in open("runs/mine/metrics.jsonl")]
rewards = [line["reward/mean"] for line in lines if line["kind"] == "train"]
```

The keys of these lines are the metrics of kind `line`; `where` is the kind of their lines. `asyncrl-top` shows the
others; `where` is their actor. Counters and histograms count from the start of the process. An unknown value is absent,
never 0. `*` stands for a name from the configuration, the reward function or the description.

`python -m asyncrl.observe.catalogue > docs/metrics.md` writes this page from the declarations; do not edit it.

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

"""The figures of catalogue_table.py and those that modules declare (``declare``), by their names, and the page of them.

``python -m asyncrl.telemetry.catalogue`` writes docs/metrics.md. A figure that is declared nowhere is None. A process
that has not imported a module, as the sinks have none of the learner's, reads its declarations from the source, the
first time that a name is not known.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.telemetry import catalogue_table
from asyncrl.telemetry.catalogue_table import METRICS, Kind, Metric

EDGES = {metric.name: metric.edges for metric in METRICS if metric.edges}
"""Upper edges of the buckets, by the name of the histogram."""
_BY_NAME = {metric.name: metric for metric in METRICS}
_FAMILIES = tuple(metric for metric in METRICS if metric.name.endswith("/*"))


def declare(name: str, kinds: str, unit: str, where: str, text: str, edges: tuple[float, ...] = ()) -> str:
    """Declare a figure at the top of the module that computes it; returns its name.

    Arguments are those of Metric, by position, ``kinds`` separated by spaces. They are read without importing the
    module, so each is a literal, or the name of edges in catalogue_table.py. AssertionError where the name is another
    figure's.
    """
    split: tuple[Kind, ...] = tuple(kinds.split())  # type: ignore[arg-type]
    metric = Metric(name, split, unit, where, text, edges)
    assert _BY_NAME.setdefault(name, metric) == metric, f"{name} is declared twice"
    if edges:
        EDGES[name] = edges
    return name


def every() -> tuple[Metric, ...]:
    """All figures: those of the table, then those of modules in the order of their names."""
    return (*METRICS, *(_BY_NAME[name] for name in _declared_in_sources()))


@cache
def _declared_in_sources() -> tuple[str, ...]:
    """Names that modules declare, imported or not; they are known from then on."""
    found: list[str] = []
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "declare(" in text and path != Path(__file__):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "declare"]
            found += [declare(*map(_value, call.args)) for call in named]
    return tuple(found)


def _value(node: ast.expr) -> Any:
    return getattr(catalogue_table, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)


def find(name: str) -> Metric | None:
    """The metric of this name, or the one that it is an instance of."""
    if (metric := _BY_NAME.get(name)) is not None:
        return metric
    group, _, rest = name.partition("/")
    if group == "eval":
        figure, _, member = rest.partition("/")[2].partition("/")
        return _BY_NAME.get(f"eval/*/{figure}/*" if member else f"eval/*/{figure}")
    _declared_in_sources()
    return _BY_NAME.get(name) or next((metric for metric in _FAMILIES if name.startswith(metric.name[:-1])), None)


def quantile(counts: list[int], edges: tuple[float, ...], share: float) -> float | None:
    """The upper edge of the bucket in which that share of the values ends; inf for the open one, None without any."""
    total = sum(counts)
    if not total:
        return None
    seen = 0
    for count, edge in zip(counts, edges, strict=False):
        seen += count
        if seen >= share * total:
            return edge
    return float("inf")


def document() -> str:
    """The text of docs/metrics.md."""
    metrics = every()
    rows = [
        "# Metrics",
        "",
        "Made by `python -m asyncrl.telemetry.catalogue > docs/metrics.md`; do not edit.",
        "",
        "Counters, gauges and histograms go to the controller with the heartbeats of the actor that has them,",
        "cumulative since the start of its process; `asyncrl-top` shows them, and `monitor/` holds recorded snapshots.",
        "Lines are the keys of `metrics.jsonl`. A figure that is not known is absent, never 0. `*` is a name of the",
        "configuration or of the reward function, or one that is listed beside it.",
        "",
        "| name | kind | unit | where | what it says |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| `{metric.name}` | {', '.join(metric.kinds)} | {metric.unit} | {metric.where} | {metric.text} |"
        for metric in metrics
    ]
    rows += [
        "",
        "## Buckets",
        "",
        "Upper edges, which belong to the bucket below; one more bucket is open above.",
        "",
        "| histogram | edges |",
        "|---|---|",
        *(f"| `{name}` | {' '.join(f'{edge:g}' for edge in edges)} |" for name, edges in EDGES.items()),
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())

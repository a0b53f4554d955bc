"""The figures of catalogue_table.py, by their names, and the page of them.

``python -m asyncrl.telemetry.catalogue`` writes docs/metrics.md. A figure that is not in the table is None.
"""

from __future__ import annotations

import sys

from asyncrl.telemetry.catalogue_table import METRICS, Metric

EDGES = {metric.name: metric.edges for metric in METRICS if metric.edges}
"""Upper edges of the buckets, by the name of the histogram."""
_BY_NAME: dict[str, Metric] = {}
for _metric in METRICS:
    _BY_NAME.setdefault(_metric.name, _metric)
_FAMILIES = tuple(metric for metric in METRICS if metric.name.endswith("/*"))


def find(name: str) -> Metric | None:
    """The metric of this name, or the one that it is an instance of."""
    if (metric := _BY_NAME.get(name)) is not None:
        return metric
    group, _, rest = name.partition("/")
    if group == "eval":
        return _BY_NAME.get(f"eval/*/{rest.rpartition('/')[2]}")
    return next((metric for metric in _FAMILIES if name.startswith(metric.name[:-1])), None)


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
        for metric in METRICS
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

"""Results of the checks on a GPU, their judgement from the lines of a run's metrics, and their table. Pure.

Invariant: a result that is not "pass" has a reason. Fails with KeyError if a line of metrics lacks what a check reads.
"""

from __future__ import annotations

import html
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

UPDATES = 10
"""Updates that a check of log-probs needs."""
RISE = 0.2
"""Rise of the held-out accuracy with which the quickstart's task counts as learned."""
OVER = 1.1
"""Largest ratio of used to estimated memory."""
BEGIN, END = "<!-- gpu_check -->\n", "<!-- end of gpu_check -->"
"""Marks of the part of a page that ``put`` replaces."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    result: Literal["pass", "fail", "skip"]
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Measured numbers, by names that hold their units."""

    def __str__(self) -> str:
        return f"{self.result:4}  {self.name:32}  {self.detail}"


def exit_code(results: Iterable[Result]) -> int:
    return int(any(each.result == "fail" for each in results))


def as_json(device: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """The object that ``--json`` prints: the device with versions, and the results."""
    return {"device": dict(device), "results": [asdict(each) for each in results]}


def judge_updates(name: str, updates: Sequence[Line], limit: float, transport: str = "") -> Result:
    """Judge the log-probs of an engine after each update; ``limit`` is the drift (nats) that stops a run.

    With ``transport`` most updates must have come by it: single ones may fall back to another.
    """
    measured = [line for line in updates if line.get("policy/drift") is not None]
    came = Counter(line["weights/transport"] for line in updates)
    ways = sorted(came)
    if len(measured) < UPDATES:
        detail = f"{len(measured)} updates were compared with the learner's log-probs, and {UPDATES} are needed"
        return Result(name, "fail", detail)
    worst = max(line["policy/drift"] for line in measured)
    figures = {"updates": len(measured), "worst_drift_nats": worst, "transports": ways}
    text = f"{len(measured)} updates by {' and '.join(ways)}; log-probs are at most {worst:.2g} nats from the learner's"
    if transport and came[transport] <= len(updates) / 2:
        return Result(name, "fail", f"{came[transport]} of {len(updates)} updates came by {transport}: {text}", figures)
    return Result(name, "pass" if worst < limit else "fail", f"{text} (limit {limit:g})", figures)


def judge_learning(name: str, accuracies: Sequence[float], gpus: str) -> Result:
    """Judge a whole run by the held-out accuracy before its first step and after its last."""
    if len(accuracies) < 2:
        return Result(name, "fail", f"{len(accuracies)} of 2 evaluations came")
    first, last = accuracies[0], accuracies[-1]
    figures = {"accuracy_before": first, "accuracy_after": last}
    detail = f"held-out accuracy {first:.2f} to {last:.2f} on {gpus}"
    return Result(name, "pass" if last - first >= RISE else "fail", detail, figures)


def judge_experts(name: str, steps: Sequence[Line], updates: Sequence[Line], limit: float) -> Result:
    """Judge a run with replayed experts: every step has routes, and updates agree as for ``judge_updates``."""
    without = [line["step"] for line in steps if "policy/routes_differ" not in line]
    if without or not steps:
        return Result(name, "fail", f"steps without routes: {without or 'all'}")
    found = judge_updates(name, updates, limit)
    differ = max(line["policy/routes_differ"] for line in steps)
    kl = max(line.get("policy/engine_kl", 0.0) for line in steps)
    detail = f"{found.detail}; at most {differ:.1%} of experts differ, and engine_kl is at most {kl:.2g} nats"
    return Result(name, found.result, detail, {**found.figures, "routes_differ": differ, "engine_kl": kl})


def judge_cost(name: str, updates: Sequence[Line]) -> Result:
    """Report the time to load a version and the generation time that an update costs; the first load is left out."""
    later = updates[1:]
    if not later:
        return Result(name, "fail", "no update came after the first")
    load_s = statistics.median(line["weights/load_s"] for line in later)
    stall_s = statistics.median(line["weights/stall_s"] for line in later)
    figures = {"load_s": load_s, "stall_s": stall_s, "bytes": later[-1]["weights/bytes"]}
    detail = f"{figures['bytes'] / 1e9:.2f} GB: loaded in {load_s:.3f} s, generation lost {stall_s:.3f} s (median)"
    return Result(name, "pass", detail, figures)


def judge_rate(name: str, rate: Mapping[str, Any]) -> Result:
    """Report the speed of the learner's step, and compare its memory with the estimate."""
    used, estimated = rate["used_bytes"], rate["estimated_bytes"]
    kernels = ", ".join(f"{each['share']:.0%} {each['name']}" for each in rate["kernels"])
    detail = (
        f"{rate['tokens_per_s']:,.0f} tokens/s, MFU {rate['mfu']:.2f}, first step {rate['first_step_s']:.1f} s; "
        f"activation checkpointing {rate['checkpointing']}: {used / 2**30:.1f} GiB used, "
        f"{estimated / 2**30:.1f} GiB estimated; most time in {kernels}"
    )
    return Result(name, "pass" if used <= OVER * estimated else "fail", detail, rate)


def table(report: Mapping[str, Any]) -> str:
    """The report as a part of a page (Markdown)."""
    versions = _cell(", ".join(f"{name} {value}" for name, value in report["device"].items()))
    rows = [f"`python -m tools.gpu_check` on {versions}:", "", "| check | result | |", "|---|---|---|"]
    keys = ("name", "result", "detail")
    rows += [f"| {' | '.join(_cell(each[key]) for key in keys)} |" for each in report["results"]]
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Escape text for a cell: names of kernels and messages of errors have characters of Markdown."""
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def put(page: str, report: Mapping[str, Any]) -> str:
    """Put the table between BEGIN and END of a page. Raises ValueError if the page lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} before {END}")
    return f"{before}{begin}\n{table(report)}\n\n{end}{after}"

"""``python -m tools.bench idle``: what rollouters that have nothing to do cost, and whether they slow a start down.

The run is that of ``scale``, but one group is leased for hours, so all rollouters but one wait for a lease. The
figures are processor time (user and system), which other load on the machine changes little:

- of a rollouter: the time of the processes of all rollouters, divided by their number;
- of the control plane: the time of each of its actors, divided by the number of rollouters.

The start is compared within the run: the time that the last part of the rollouters takes to get ready over that of the
first part, and the same for the processor time of all processes. A part is PART rollouters, or a quarter of fewer.

Fails with ActorFailed when an actor ends, or the rollouters are not all ready within READY_S.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import Snapshot
from asyncrl.top.client import Viewer, WatchedRun
from tools.bench.report import Report, Target
from tools.bench.scale_run import READY_S, Processes, by_processors, config, running

PART = 100
SETTLE_S = 10.0
"""Time from when all are ready to the beginning of the measured time."""
SLICES = 5
"""Parts of the measured time; the figures are their medians."""
ROLLOUTERS = "rollouters"


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the start was at a moment."""

    at: float
    """Seconds since the first process was started."""
    cpu_s: float = 0.0
    """Processor time of all processes so far."""
    ready: int = 0
    """Rollouters that were ready, or all actors."""


@dataclass(frozen=True, slots=True)
class Part:
    """The time that a part of the start took."""

    seconds: float
    cpu_s: float


def part_of(marks: Sequence[Mark], first: int, last: int) -> Part:
    """The time from ``first`` ready rollouters to ``last``, with linear steps between the marks."""
    begin, end = _when(marks, first), _when(marks, last)
    return Part(end[0] - begin[0], end[1] - begin[1])


def _when(marks: Sequence[Mark], ready: int) -> tuple[float, float]:
    before = marks[0]
    for mark in marks:
        if mark.ready >= ready:
            share = (ready - before.ready) / (mark.ready - before.ready) if mark.ready > before.ready else 1.0
            return before.at + share * (mark.at - before.at), before.cpu_s + share * (mark.cpu_s - before.cpu_s)
        before = mark
    raise ValueError(f"{ready} rollouters were never ready")


def measure(report: Report, *, replicas: int, per_process: int | None, seconds: int) -> None:
    """Run it and report."""
    per_process = per_process or by_processors(replicas)
    report.settings |= {"rollouters": replicas, "rollouters_per_process": per_process, "seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder:
        chosen = config(Path(folder), replicas, idle=True)
        with running(chosen, replicas, per_process) as (_, processes, target):
            marks, costs = asyncio.run(_follow(target, processes, replicas, seconds))
            processes.ask_to_end()
    report_idle(report, costs, replicas)
    report_start(report, marks)


def report_idle(report: Report, slices: Sequence[Mapping[str, float]], rollouters: int) -> None:
    """Add what a rollouter costs (ms of processor time each second), from cores by role in each slice."""
    figures = {}
    for role in slices[0]:
        each = sorted(1e3 * cores[role] / rollouters for cores in slices)
        figures[role] = {"ms_per_s": each[len(each) // 2], "low": each[0], "high": each[-1]}
    totals = sorted(1e3 * sum(cores.values()) / rollouters for cores in slices)
    figures["all"] = {"ms_per_s": totals[len(totals) // 2], "low": totals[0], "high": totals[-1]}
    report.figures["idle"] = figures
    for role, found in figures.items():
        report.say(
            f"{role:18} {found['ms_per_s']:.3f} ms of processor time a second for each idle rollouter "
            f"[{found['low']:.3f}, {found['high']:.3f}]"
        )


def first_and_last(marks: Sequence[Mark]) -> tuple[int, Part, Part]:
    """Size of a part of the start, what the first one took, and the last."""
    everybody = marks[-1].ready
    count = min(PART, max(1, everybody // 4))
    return count, part_of(marks, 0, count), part_of(marks, everybody - count, everybody)


def report_start(report: Report, marks: Sequence[Mark]) -> None:
    """Add the time that the first and the last rollouters took to get ready."""
    count, first, last = first_and_last(marks)
    report.figures["start"] = {
        "ready_s": round(marks[-1].at, 1),
        "part": count,
        "first_s": first.seconds,
        "last_s": last.seconds,
        "first_cpu_s": first.cpu_s,
        "last_cpu_s": last.cpu_s,
    }
    report.say(
        f"start: all ready after {marks[-1].at:.1f} s; the first {count} took {first.seconds:.1f} s "
        f"({first.cpu_s:.1f} s of processor time), the last {count} {last.seconds:.1f} s ({last.cpu_s:.1f} s)"
    )
    report.ratio("start_last_over_first", last.seconds / first.seconds, Target("<=", 1.0))
    report.ratio("start_cpu_last_over_first", last.cpu_s / first.cpu_s, Target("<=", 1.0))


async def _follow(
    target: WatchedRun, processes: Processes, rollouters: int, seconds: float
) -> tuple[list[Mark], list[dict[str, float]]]:
    began = time.monotonic()
    marks = [Mark(0.0, sum(_cpu_s(processes).values()))]
    with Viewer(target) as viewer:
        async for news in viewer.snapshots():
            processes.check()
            now = time.monotonic() - began
            if isinstance(news, Snapshot):
                waiting = sum(name.startswith("rollouter/") for name in news.run.waiting_for)
                ready = 0 if news.run.phase == "starting" and not news.run.waiting_for else rollouters - waiting
                marks.append(Mark(now, sum(_cpu_s(processes).values()), max(ready, marks[-1].ready)))
                if news.run.phase == "running" and not waiting:
                    break
            if now > READY_S:
                raise ActorFailed("the run", f"{marks[-1].ready} of {rollouters} rollouters ready after {now:.0f} s")
    await asyncio.sleep(SETTLE_S)
    costs = []
    before, at = _cpu_s(processes), time.monotonic()
    for _ in range(SLICES):
        await asyncio.sleep(seconds / SLICES)
        after, now = _cpu_s(processes), time.monotonic()
        costs.append({role: (after[role] - before[role]) / (now - at) for role in after})
        before, at = after, now
    processes.check()
    return marks, costs


def _cpu_s(processes: Processes) -> dict[str, float]:
    """Processor time of the processes by role (s)."""
    found: dict[str, float] = {}
    for name, process in processes.started.items():
        role = ROLLOUTERS if name.startswith("rollouters-") else name.partition("/")[0]
        times = psutil.Process(process.pid).cpu_times()
        found[role] = found.get(role, 0.0) + times.user + times.system
    return found

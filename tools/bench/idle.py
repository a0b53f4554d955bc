"""``python -m tools.bench idle``: what rollouters that have nothing to do cost.

The run is that of ``scale``, but one group is leased for hours, so all rollouters but one wait for a lease. The
figures are processor time (user and system), which other load on the machine changes little:

- of a rollouter: the time of the processes of all rollouters, divided by their number;
- of the control plane: the time of each of its actors, divided by the number of rollouters.

Fails with ActorFailed when an actor ends, or the rollouters are not all ready within READY_S; with TimeoutError when
the controller is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import psutil

from asyncrl.top.client import WatchedRun, follow
from tools.bench.report import Report
from tools.bench.scale_run import READY_S, Processes, Watch, by_processors, is_whole, running

SETTLE_S = 10.0
"""Time from when all are ready to the beginning of the measured time."""
SLICES = 5
"""Parts of the measured time; the figures are their medians."""


def measure(report: Report, *, replicas: int = 256, seconds: int = 30) -> None:
    report.settings |= {"rollouters": replicas, "rollouters_per_process": by_processors(replicas), "seconds": seconds}
    with running(replicas, idle=True) as (processes, target):
        costs = asyncio.run(_follow(report, target, processes, seconds))
    report_idle(report, costs, replicas)


def report_idle(report: Report, slices: Sequence[Mapping[str, float]], rollouters: int) -> None:
    """Add what a rollouter costs (ms of processor time each second), from cores by role in each slice."""
    figures = report.figures["idle"] = {}
    for role in [*slices[0], "all"]:
        each = [1e3 * (sum(cores.values()) if role == "all" else cores[role]) / rollouters for cores in slices]
        found = figures[role] = {"ms_per_s": median(each), "low": min(each), "high": max(each)}
        report.say(
            f"{role:18} {found['ms_per_s']:.3f} ms of processor time a second for each idle rollouter "
            f"[{found['low']:.3f}, {found['high']:.3f}]"
        )


async def _follow(report: Report, target: WatchedRun, processes: Processes, seconds: float) -> list[dict[str, float]]:
    async with contextlib.aclosing(follow(target)) as snapshots:
        watch = Watch(snapshots, processes, report.say)
        await watch.until(lambda now, _: now.run.phase == "running" and is_whole(now), READY_S, "start")
        await asyncio.sleep(SETTLE_S)
        costs = []
        before, at = _cpu_s(processes), time.monotonic()
        for _ in range(SLICES):
            await asyncio.sleep(seconds / SLICES)
            after, now = _cpu_s(processes), time.monotonic()
            costs.append({role: (after[role] - before[role]) / (now - at) for role in after})
            before, at = after, now
        await watch.end()
    return costs


def _cpu_s(processes: Processes) -> dict[str, float]:
    """Processor time of the processes by role (s)."""
    found: dict[str, float] = defaultdict(float)
    for name, process in processes.started.items():
        times = psutil.Process(process.pid).cpu_times()
        role = "rollouters" if name.startswith("rollouters-") else name.partition("/")[0]
        found[role] += times.user + times.system
    return found

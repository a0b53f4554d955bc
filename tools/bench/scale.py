"""``python -m tools.bench scale``: one control plane under many rollouters.

Controller, dataloader, learner, parameter server and reward pool are those of a real run: each is a process on real
sockets with heartbeats and recorded snapshots. Engines and learner are timing models. If the machine has too few
processors, several rollouters share a process (``settings`` has the number), each with its own sockets. Their processor
time is then that of their agent. They would run on other hosts, so they get only the processor time that the control
plane leaves. For the control plane such a process is a host with a node agent.

The measurement begins when all rollouters are ready, the trajectories are in flight and a step is trained. The first
phase has ``steps`` undisturbed steps. On request, one host then freezes (``freeze_s``), and the phase lasts until the
run has recovered.

The lag of an event loop is the delay of a timer every 0.1 s, and includes the wait for a processor. A late timer counts
for all missed ones. Nothing is lost if every leased group was trained once, filtered or quarantined, leased again
after a death, or is outstanding, all actors are ready, and no message was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.monitor import ActorView, Interval, Snapshot
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.top.client import WatchedRun, follow
from tools.bench.report import Report, Target
from tools.bench.scale_run import (
    READY_S,
    Processes,
    Watch,
    by_processors,
    concurrency,
    is_whole,
    running,
    total,
)

IN_FLIGHT_SHARE = 0.95
"""Share of the trajectories that are to be in flight: with so many the measured time begins."""
FULL_S = 300.0
"""Longest time from when all are ready to when the trajectories are in flight."""
SHORTEST_S = 20.0
"""Shortest phase: a lag every 0.1 s makes two hundred samples, so two are above the 99th percentile."""
STEP_S = 120.0
"""Longest that a step may take."""
RECOVERY_S = 300.0
"""Longest that a run may take to recover from a frozen host."""
LAG = "loop/lag_s"
LAG_TARGET_S = 0.05
CONTROL_PLANE = ("controller/0", "dataloader/0", "learner/0", "parameter_server/0", "reward/0")
"""Actors whose lag is aimed at."""
FAULTS = (
    "wire/strangers",
    "wire/refused",
    "wire/malformed",
    "wire/unsent",
    "errors/handler",
    "heartbeats/ignored",
    "events/dropped",
    "facts/late",
    "snapshots/lost",
    "records/lost",
)
OF_THE_DEAD = ("wire/strangers", "wire/refused", "heartbeats/ignored")
"""Faults that are also counted when an actor that is known to be dead is heard of again, and turned away."""


def measure(report: Report, *, replicas: int = 256, steps: int = 8, freeze_s: float = 0.0) -> None:
    report.settings |= {
        "rollouters": replicas,
        "trajectories_in_flight": replicas * concurrency(replicas),
        "rollouters_per_process": by_processors(replicas),
        "steps": steps,
        "freeze_s": freeze_s,
    }
    report.say(", ".join(f"{name} {value}" for name, value in report.settings.items()))
    with running(replicas) as (processes, target):
        asyncio.run(_follow(report, target, processes, steps, freeze_s))


async def _follow(report: Report, target: WatchedRun, processes: Processes, steps: int, freeze_s: float) -> None:
    """Follow the run until everything is measured and it is over. Raises ActorFailed."""
    began = time.monotonic()
    wanted = IN_FLIGHT_SHARE * report.settings["trajectories_in_flight"]
    async with contextlib.aclosing(follow(target)) as snapshots:
        watch = Watch(snapshots, processes, report.say)
        await watch.until(lambda now, _: now.run.phase == "running", READY_S, "start")
        ready_s = time.monotonic() - began
        first = await watch.until(
            lambda now, _: total(now, "rollout/in_flight") >= wanted and now.run.step > 0, FULL_S, "filling"
        )
        report.figures["start"] = {"ready_s": round(ready_s, 1), "full_s": round(time.monotonic() - began, 1)}
        report.say(f"all ready after {ready_s:.0f} s")

        def is_steady(now: Snapshot, seconds: float) -> bool:
            return seconds >= SHORTEST_S and now.run.step - first.run.step >= steps

        last = await watch.until(is_steady, STEP_S * steps, "steady")
        report_phase(report, "steady", first, last)
        if freeze_s:
            host = processes.hosts[-1]
            host.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(freeze_s, host.send_signal, signal.SIGCONT)

            def is_well(now: Snapshot, seconds: float) -> bool:
                # An actor that is heard of again may be no more than not yet known to be dead.
                return seconds >= freeze_s + SHORTEST_S and is_whole(now) and now.run.step > last.run.step

            after = await watch.until(is_well, freeze_s + RECOVERY_S, "frozen")
            report_phase(report, "frozen", last, after, of_the_dead=True)
        await watch.end()


def _of(snapshot: Snapshot, name: str) -> ActorView:
    return next(actor for actor in snapshot.actors if actor.name == name)


def lost(first: Snapshot, snapshot: Snapshot, *, of_the_dead: bool = False) -> dict[str, float]:
    """Losses between two snapshots, by their kind; possibly empty. ``of_the_dead``: some actors died."""
    faults = [name for name in FAULTS if not (of_the_dead and name in OF_THE_DEAD)]
    # The counters of a restarted actor begin at 0.
    found = {name: count for name in faults if (count := max(0.0, total(snapshot, name) - total(first, name)))}
    leases = _of(snapshot, "dataloader/0").metrics
    kinds = ("trained", "filtered", "quarantined", "returned", "recovered")
    over = sum(leases.get(f"tickets/{kind}", 0.0) for kind in kinds)
    missing = leases["tickets/granted"] - over - leases["tickets/outstanding"]
    if missing:
        found["groups not accounted for"] = missing
    if failed := sum(actor.condition not in ("ready",) for actor in snapshot.actors):
        found["actors that are not ready"] = failed
    return found


def report_phase(report: Report, name: str, first: Snapshot, last: Snapshot, *, of_the_dead: bool = False) -> None:
    """The lag and the losses of a phase, and the bytes of heartbeats. ``of_the_dead``: some actors died."""
    seconds, meanwhile, steps = last.wall - first.wall, Interval(first, last), last.run.step - first.run.step
    sent = (total(last, "heartbeats/sent_bytes") - total(first, "heartbeats/sent_bytes")) / seconds
    found = report.figures[name] = {"measured_s": round(seconds, 1), "steps": steps, "heartbeat_bytes_per_s": sent}
    report.say(f"{name}: {seconds:.0f} s, {steps} steps, {sent / 1e3:.1f} kB/s of heartbeats")
    for actor in CONTROL_PLANE:
        found[f"lag_{actor.partition('/')[0]}"] = report_lag(report, name, _of(last, actor), meanwhile)
    problems = found["lost"] = lost(first, last, of_the_dead=of_the_dead)
    report.ratio(f"{name}_lost", sum(problems.values()), Target("<=", 0))
    report.say(f"lost: {problems or 'nothing'}")


def report_lag(report: Report, phase: str, now: ActorView, meanwhile: Interval) -> dict[str, float | None]:
    """The lag of the event loop of an actor."""
    histogram, edges, role = meanwhile.histogram(now, LAG), edges_of(LAG), now.name.partition("/")[0]
    counts = [] if histogram is None else histogram.counts
    found = {f"p{share * 100:g}_s": quantile(counts, edges, share) for share in (0.5, 0.9, 0.99, 0.999)}
    typical, late_s = found["p50_s"], found["p99_s"]
    if typical is None or late_s is None:
        raise ActorFailed(now.name, "reported no lag of its event loop")
    late = sum(counts[edges.index(LAG_TARGET_S) + 1 :]) / sum(counts)
    # By buckets: the p99 lies at or below the target exactly if no more than 1 % are above it.
    report.ratio(f"{phase}_lag_p99_{role}_s", late_s, Target("<=", LAG_TARGET_S))
    report.say(
        f"{now.name:14} lag p50 ≤ {1e3 * typical:g} ms, p99 ≤ {1e3 * late_s:g} ms, {100 * late:.2f} % over 50 ms; "
        f"loop busy {100 * now.loop_busy:.0f} %, {now.cpu:.2f} cores"
    )
    return {
        **found,
        "over_50ms_share": late,
        "samples": sum(counts),
        "loop_busy": now.loop_busy,
        "cpu": now.cpu,
        "rss_bytes": now.rss_bytes,
    }

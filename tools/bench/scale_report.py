"""The figures of ``scale``: lag, losses and traffic."""

from __future__ import annotations

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import ActorView, Snapshot
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.observe.snapshots.rates import Interval
from tools.bench.idle import first_and_last
from tools.bench.report import Report, Target
from tools.bench.scale_watch import Seen, Watched, total

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


def report_all(report: Report, seen: Watched, recorded: int) -> None:
    """Add what is not of a single phase; ``recorded`` is the size of the recorded snapshots in bytes."""
    figures = report.figures
    figures["start"] = {"ready_s": round(seen.ready_s, 1), "first_step_s": round(seen.first_step_s, 1)}
    report.say(f"all ready after {seen.ready_s:.0f} s, the first step trained after {seen.first_step_s:.0f} s")
    if seen.marks[-1].ready:
        count, first_part, last_part = first_and_last(seen.marks)
        figures["start"] |= {"part": count, "first_s": first_part.seconds, "last_s": last_part.seconds}
        report.ratio("start_last_over_first", last_part.seconds / first_part.seconds, Target("<=", 1.0))
        report.say(f"the first {count} took {first_part.seconds:.1f} s, the last {count} {last_part.seconds:.1f} s")
    report_traffic(report, seen.phases[0], recorded)


def report_phase(report: Report, seen: Seen) -> None:
    """The lag and the losses of a phase."""
    first, last, name = seen.first, seen.last, seen.phase.name
    seconds, meanwhile = last.wall - first.wall, Interval(first, last)
    steps, in_flight = last.run.step - first.run.step, sum(seen.in_flight) / len(seen.in_flight)
    found = report.figures[name] = {
        "measured_s": round(seconds, 1),
        "steps": steps,
        "in_flight": {"mean": in_flight, "most": max(seen.in_flight)},
    }
    report.say(f"{name}: {seconds:.0f} s, {steps} steps, {in_flight:.0f} trajectories in flight on average")
    for actor in CONTROL_PLANE:
        found[f"lag_{actor.partition('/')[0]}"] = report_lag(report, name, _of(last, actor), meanwhile)
    problems = found["lost"] = lost(first, last, of_the_dead=seen.phase.of_the_dead)
    report.ratio(f"{name}_lost", sum(problems.values()), Target("<=", 0))
    report.say(f"lost: {problems or 'nothing'}")


def report_traffic(report: Report, seen: Seen, recorded: int) -> None:
    """What the actors report, and what the recorded snapshots take."""
    first, last = seen.first, seen.last
    seconds = last.wall - first.wall
    found = report.figures["metrics_traffic"] = {
        "bytes_per_s": (total(last, "heartbeats/sent_bytes") - total(first, "heartbeats/sent_bytes")) / seconds,
        "heartbeats_per_s": (total(last, "heartbeats/sent") - total(first, "heartbeats/sent")) / seconds,
        "snapshot_bytes": _of(last, "controller/0").metrics["snapshots/bytes"],
        "recorded_bytes": recorded,
        "largest_gap_s": seen.largest_gap_s,
    }
    report.say(
        f"metrics: {found['bytes_per_s'] / 1e3:.1f} kB/s in {found['heartbeats_per_s']:.0f} heartbeats/s; "
        f"a snapshot has {found['snapshot_bytes'] / 1e3:.0f} kB, at most {seen.largest_gap_s:.2f} s after the last"
    )


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

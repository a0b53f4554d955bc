"""The figures of ``scale``: lag, losses, traffic, and what the facts and asyncrl-top cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import ActorView, Snapshot
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.observe.metrics import Histograms
from asyncrl.observe.snapshots.rates import Interval
from asyncrl.observe.states import StateLedger
from tools.bench.report import Report, Target
from tools.bench.scale_idle import first_and_last
from tools.bench.scale_watch import Seen, Watched, total

LAG = "loop/lag_s"
FACTS_TARGET = 0.01
OBSERVED_S = 3e-6
"""Cost, at most, to count a value and to measure it, the timer of the event loop's lag included."""
COUNTED_AT_ONCE = frozenset({"staleness/tokens"})
"""Histograms that count many values in one call."""
TIMED = 20_000
LAG_TARGET_S = 0.05
TOP_TARGET = 0.10
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
    if seen.drawing is not None:
        drawing = seen.drawing
        figures["top"] = asdict(drawing)
        report.ratio("top_cores", drawing.cores, Target("<=", TOP_TARGET))
        report.ratio("top_drawn_seconds", drawing.seconds_share, Target(">=", 1.0))
        report.say(
            f"asyncrl-top: {drawing.cores:.3f} of a core, drew in {100 * drawing.seconds_share:.1f} % of all seconds, "
            f"longest time without {drawing.longest_s:.2f} s"
        )


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
    """The cost of facts and of their watching."""
    first, last, figures = seen.first, seen.last, report.figures
    seconds, meanwhile = last.wall - first.wall, Interval(first, last)
    sent = {side: total(s, "heartbeats/sent_bytes") for side, s in (("first", first), ("last", last))}
    beats = total(last, "heartbeats/sent") - total(first, "heartbeats/sent")
    largest = max(actor.metrics.get("heartbeats/largest_bytes", 0.0) for actor in last.actors)
    controller = _of(last, "controller/0").metrics
    figures["metrics_traffic"] = {
        "bytes_per_s": (sent["last"] - sent["first"]) / seconds,
        "heartbeats_per_s": beats / seconds,
        "mean_heartbeat_bytes": (sent["last"] - sent["first"]) / max(1.0, beats),
        "largest_heartbeat_bytes": largest,
        "snapshot_bytes": controller["snapshots/bytes"],
        "snapshot_take_s": controller["snapshots/take_s"],
        "recorded_bytes": recorded,
        "recorded_s": last.run.age_s,
    }
    traffic = figures["metrics_traffic"]
    report.say(
        f"metrics: {traffic['bytes_per_s'] / 1e3:.1f} kB/s in {traffic['heartbeats_per_s']:.0f} heartbeats/s "
        f"(mean {traffic['mean_heartbeat_bytes']:.0f} bytes, largest {largest:.0f}); a snapshot has "
        f"{traffic['snapshot_bytes'] / 1e3:.0f} kB and takes {1e3 * traffic['snapshot_take_s']:.0f} ms; recorded "
        f"{recorded / 1e3:.0f} kB in {last.run.age_s:.0f} s"
    )
    _report_cost(report, meanwhile, last)
    figures["deliver"] = _spread(meanwhile, last, "rollout/deliver_s")
    figures["repeated_deliveries"] = total(last, "groups/duplicate") - total(first, "groups/duplicate")
    figures["viewer"] = {"snapshots_per_s": seen.snapshots / seconds, "largest_gap_s": seen.largest_gap_s}
    report.say(f"viewer: {seen.snapshots / seconds:.2f} snapshots/s, largest gap {seen.largest_gap_s:.2f} s")


def _spread(meanwhile: Interval, last: Snapshot, name: str) -> dict[str, float | None]:
    """Quantiles of what all actors observed, by upper edges of buckets."""
    counts = [0] * (len(edges_of(name)) + 1)
    for actor in last.actors:
        if (histogram := meanwhile.histogram(actor, name)) is not None:
            counts = [a + b for a, b in zip(counts, histogram.counts, strict=True)]
    return {f"p{share * 100:g}_s": quantile(counts, edges_of(name), share) for share in (0.5, 0.99)}


def _report_cost(report: Report, meanwhile: Interval, last: Snapshot) -> None:
    """Share of an actor's time: its heartbeats, and a second's worth of what its event loop does for the facts."""
    shares = {}
    for actor in last.actors:
        beating = meanwhile.rate(actor, "facts/cpu_s")
        if beating is not None:
            found = (meanwhile.histogram(actor, name) for name in actor.histograms if name not in COUNTED_AT_ONCE)
            observed = sum(sum(histogram.counts) for histogram in found if histogram is not None)
            shares[actor.name] = beating + observed * OBSERVED_S / meanwhile.seconds
    most = max(shares, key=lambda name: shares[name])
    typical = sorted(shares.values())[len(shares) // 2]
    costs = {"observe_s": _time_of(_observing()), "enter_s": _time_of(_entering())}
    report.figures["facts"] = {"most": shares[most], "of": most, "median": typical, **costs}
    report.ratio("facts_share", shares[most], Target("<=", FACTS_TARGET))
    report.say(
        f"facts: {100 * typical:.2f} % of an actor's time, at most {100 * shares[most]:.2f} % ({most}); "
        f"to count a value takes {1e6 * costs['observe_s']:.2f} µs, to enter a state {1e6 * costs['enter_s']:.2f} µs"
    )


def _observing() -> Callable[[], object]:
    histograms = Histograms()
    return lambda: histograms.observe("calls/round_trip_s", 0.004)


def _entering() -> Callable[[], object]:
    ledger = StateLedger(time.monotonic, "engine")
    return lambda: ledger.enter("generating", "")


def _time_of(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    began = time.thread_time()
    for _ in range(TIMED):
        work()
    return (time.thread_time() - began) / TIMED


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

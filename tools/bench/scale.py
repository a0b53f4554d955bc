"""``python -m tools.bench scale``: one control plane under many rollouters, and what watching it costs.

Controller, dataloader, learner, parameter server and reward pool are what they are in any run, each a process of its
own on real sockets, under full monitoring: heartbeats of all, recorded snapshots, and somebody who watches. Engines and
learner are timing models. Where the machine has not the processors for as many processes, several rollouters share one
(``settings`` says how many), each with its own sockets; their figures of processors are then those of the process. They
would be on other hosts, so they run when the control plane does not (SCHED_IDLE).

The measured time begins when all rollouters are ready and the trajectories are in flight, and ends when the run needs
no more of them.
The lag of an event loop is that of a timer every 0.1 s; one that comes late counts for all that should have come.
Nothing is lost if every granted group was trained once, filtered or quarantined, or is still out, and nothing went
wrong on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.errors import ActorFailed
from asyncrl.launcher.folders import RunFolder, create_run_folder, private_folder
from asyncrl.monitor.catalogue import EDGES, quantile
from asyncrl.monitor.client import Target, Viewer, find_target
from asyncrl.monitor.metrics import Histograms
from asyncrl.monitor.states import StateLedger
from asyncrl.snapshot import ActorView, Histogram, Snapshot
from tools.bench.report import Report
from tools.bench.report import Target as Aim

SAMPLES = 8
PROCESSES_PER_CPU = 4
CONCURRENCY = 64
"""Trajectories in flight in each rollouter."""
GROUPS_SHARE = 0.25
"""Of all groups in flight that a step trains."""
FILL_STEPS = 10
"""What is out at a time, and a little: the gate grants no more than the run still needs."""
IN_FLIGHT_SHARE = 0.95
"""Of the trajectories that are to be in flight: with fewer than that the measured time is over."""
STALENESS_MAX = 11
LAG = "loop/lag_s"
FACTS_TARGET = 0.01
OBSERVED_S = 3e-6
"""What it costs, at most, to count a value and to measure it, the timer of the event loop's lag included."""
COUNTED_AT_ONCE = frozenset({"staleness/tokens"})
"""Many values by one call."""
TIMED = 20_000
LAG_TARGET_S = 0.05
TOP_TARGET = 0.10
CONTROL_PLANE = ("controller/0", "dataloader/0", "learner/0")
"""Whose lag is aimed at."""
READY_S = 600.0
RUN_S = 1800.0
END_S = 60.0
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


def config(folder: Path, rollouters: int, steps: int) -> Config:
    """Responses of some 450 tokens that take about 40 s each."""
    groups = max(1, int(GROUPS_SHARE * rollouters * CONCURRENCY / SAMPLES))
    return validate_config(
        {
            "run": {"name": "scale", "dir": str(folder), "samples_per_step": 0},
            "data": {"source": "synthetic", "size": 1 << 17},
            "rollout": {
                "engine": "sim",
                "replicas": rollouters,
                "gpus_per_replica": 0,
                "samples_per_prompt": SAMPLES,
                "concurrency": CONCURRENCY,
                "max_tokens": 2048,
                "stream_interval": 32,
                "sim": {
                    "length": "lognormal",
                    "length_median": 400.0,
                    "length_sigma": 0.5,
                    "decode_step_s": 0.06,
                    "decode_step_per_request_s": 0.0005,
                    "load_s": 0.5,
                },
            },
            "reward": {"function": "constant", "workers": 1, "options": {"value": 0.5, "spread": 0.5}},
            "learner": {
                "backend": "sim",
                "steps": steps + FILL_STEPS,
                "groups_per_step": groups,
                "steps_per_version": 1,
                "dynamic_sampling": False,
                "sim": {"step_s": 1.0, "publish_bytes": 1 << 20},
            },
            "staleness": {"max": STALENESS_MAX, "adapt": False},
            "weights": {"max_paused_fraction": 0.25},
            "checkpoint": {"every_versions": 0, "export_at_end": False},
            "supervision": {"drain_s": 20.0, "start_timeout_s": READY_S},
            "log": {"level": "warning"},
        }
    )


def per_process(rollouters: int) -> int:
    """How many share a process here, so that there are no more than PROCESSES_PER_CPU of them for each processor."""
    processes = PROCESSES_PER_CPU * len(os.sched_getaffinity(0))
    return max(1, -(-rollouters // processes))


@dataclass(slots=True)
class Processes:
    """What was started, each with its log."""

    folder: RunFolder
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, words: Sequence[str]) -> None:
        """``python WORDS``."""
        with (self.folder.logs / f"{name.replace('/', '-')}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def actor(self, name: str, controller: str = "") -> None:
        """An actor, as its agent would start it."""
        words = ["-m", "asyncrl.cli.actor", name, "--run", str(self.folder.path), "--attempt", "0"]
        words += ["--incarnation", str(time.time_ns())]
        self.start(name, [*words, "--controller", controller] if controller else words)

    def check(self) -> None:
        """Raise ActorFailed if any has failed."""
        for name, process in self.started.items():
            if process.poll():
                log = (self.folder.logs / f"{name.replace('/', '-')}.log").read_text()
                raise ActorFailed(name, f"exit code {process.returncode}:\n{log[-2000:]}")

    def close(self, grace_s: float) -> None:
        """Wait for their ends, and end those that are still there."""
        until = time.monotonic() + grace_s
        for process in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(slots=True)
class Top:
    """asyncrl-top in a terminal of its own, which nobody sees."""

    process: subprocess.Popen[bytes]
    terminal: int
    began: float
    seconds: set[int] = field(default_factory=set)
    """In which it drew anything."""
    cpu_s: float = 0.0
    start_cpu_s: float = 0.0
    """Until it drew for the first time."""

    @classmethod
    def start(cls, run_dir: Path) -> Top:
        """On the run in this folder."""
        terminal, theirs = pty.openpty()
        os.set_blocking(terminal, False)
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "180", "LINES": "50"}
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli.top", str(run_dir)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        return cls(process, terminal, time.monotonic())

    def read(self) -> None:
        """Take what it has drawn."""
        with contextlib.suppress(OSError):
            while os.read(self.terminal, 1 << 16):
                self.seconds.add(int(time.monotonic() - self.began))
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            self.cpu_s = times.user + times.system
            if not self.seconds:
                self.start_cpu_s = self.cpu_s

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)


@contextlib.contextmanager
def running(chosen: Config, rollouters: int, per_process: int) -> Iterator[tuple[RunFolder, Processes, Target]]:
    """A run whose processes are all started."""
    folder = create_run_folder(chosen)
    with private_folder(folder, chosen):
        processes = Processes(folder)
        try:
            processes.actor("controller/0")
            target = _wait_for_controller(folder, processes)
            for name in chosen.actors:
                if not name.startswith(("controller/", "rollouter/")):
                    processes.actor(name, target.address)
            for first in range(0, rollouters, per_process):
                count = min(per_process, rollouters - first)
                words = ["-m", "tools.bench.scale_host", str(folder.path), target.address, str(first), str(count)]
                processes.start(f"rollouters-{first}", words)
            yield folder, processes, target
        except BaseException:
            processes.close(0.0)
            raise
        processes.close(END_S)


def _wait_for_controller(folder: RunFolder, processes: Processes) -> Target:
    until = time.monotonic() + READY_S
    while not (folder.private / "controller.json").exists():
        processes.check()
        if time.monotonic() > until:
            raise ActorFailed("controller/0", f"not up after {READY_S:g} s")
        time.sleep(0.05)
    return find_target(str(folder.path))


@dataclass(slots=True)
class Watched:
    """What was seen of the run."""

    first: Snapshot
    """When the measured time began."""
    last: Snapshot
    """When it ended."""
    end: Snapshot
    """Before the run drained."""
    snapshots: int = 0
    largest_gap_s: float = 0.0
    """Between two snapshots."""
    most_in_flight: int = 0
    in_flight: list[float] = field(default_factory=list)
    top_cpu_s: float = 0.0
    top_s: float = 0.0
    top_drawn: int = 0
    """Seconds in which the screen changed."""


async def follow(target: Target, processes: Processes, wanted: int, *, top: bool) -> Watched:
    """Until the run is over. Raises ActorFailed."""
    seen: Watched | None = None
    screen: Top | None = None
    at = time.monotonic()
    with Viewer(target) as viewer:
        try:
            async for snapshot in _snapshots(viewer, processes):
                now = time.monotonic()
                in_flight = _sum(snapshot, "rollout/in_flight")
                if seen is None:
                    if snapshot.run.phase == "running" and in_flight >= wanted:
                        seen = Watched(snapshot, snapshot, snapshot)
                        if top:
                            assert target.run_dir is not None
                            screen = Top.start(target.run_dir)
                elif snapshot.run.phase == "running":
                    seen.end = snapshot
                    if in_flight < IN_FLIGHT_SHARE * wanted:
                        continue
                    seen.largest_gap_s = max(seen.largest_gap_s, now - at)
                    seen.snapshots += 1
                    seen.last = snapshot
                    seen.most_in_flight = max(seen.most_in_flight, int(in_flight))
                    seen.in_flight.append(in_flight)
                    if screen is not None:
                        screen.read()
                        # From its first picture on.
                        seen.top_cpu_s, seen.top_drawn = screen.cpu_s - screen.start_cpu_s, len(screen.seconds)
                        seen.top_s = now - screen.began - min(screen.seconds, default=0)
                at = time.monotonic()
                if snapshot.run.phase not in ("starting", "running"):
                    if snapshot.run.exit_code:
                        raise ActorFailed("the run", snapshot.run.reason)
                    if seen is None:
                        raise ActorFailed("the run", f"over before {wanted} trajectories were in flight")
                    return seen
        finally:
            if screen is not None:
                screen.close()
    raise ActorFailed("the run", "the controller is gone")


async def _snapshots(viewer: Viewer, processes: Processes) -> AsyncIterator[Snapshot]:
    async with asyncio.timeout(RUN_S):
        async for news in viewer.snapshots():
            processes.check()
            if isinstance(news, Snapshot):
                yield news


def _sum(snapshot: Snapshot, figure: str) -> float:
    return sum(actor.figures.get(figure, 0.0) for actor in snapshot.actors)


def _of(snapshot: Snapshot, name: str) -> ActorView:
    return next(actor for actor in snapshot.actors if actor.name == name)


def between(first: Histogram | None, last: Histogram) -> list[int]:
    """The counts of what was observed meanwhile."""
    before = first.counts if first is not None else [0] * len(last.counts)
    return [later - earlier for earlier, later in zip(before, last.counts, strict=True)]


def lost(snapshot: Snapshot) -> dict[str, float]:
    """What went wrong, by what it is; empty if nothing did."""
    found = {name: total for name in FAULTS if (total := _sum(snapshot, name))}
    tickets = _of(snapshot, "dataloader/0").figures
    over = sum(tickets.get(f"tickets/{kind}", 0.0) for kind in ("trained", "filtered", "quarantined", "returned"))
    missing = tickets["tickets/granted"] - over - tickets["tickets/outstanding"]
    if missing:
        found["groups not accounted for"] = missing
    if failed := sum(actor.condition not in ("ready",) for actor in snapshot.actors):
        found["actors that are not ready"] = failed
    return found


def measure(report: Report, *, rollouters: int, per_process: int, steps: int, top: bool) -> None:
    """Run it and report."""
    wanted = rollouters * CONCURRENCY
    shared = f"{per_process} rollouters share a process, each with its own sockets"
    report.settings |= {
        "rollouters": rollouters,
        "trajectories_in_flight": wanted,
        "rollouters_per_process": per_process,
        "processes": shared if per_process > 1 else "each rollouter has a process of its own",
        "steps": steps,
    }
    report.say(f"{rollouters} rollouters, {wanted} trajectories in flight; {report.settings['processes']}")
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    try:
        chosen = config(folder, rollouters, steps)
        with running(chosen, rollouters, per_process) as (run, processes, target):
            seen = asyncio.run(follow(target, processes, wanted, top=top))
            recorded = sum(path.stat().st_size for path in (run.path / "monitor").glob("*"))
        _report(report, seen, recorded)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(report: Report, seen: Watched, recorded: int) -> None:
    first, last, figures = seen.first, seen.last, report.figures
    seconds = last.wall - first.wall
    figures["measured_s"] = round(seconds, 1)
    figures["steps"] = last.run.step - first.run.step
    figures["in_flight"] = {"mean": sum(seen.in_flight) / len(seen.in_flight), "most": seen.most_in_flight}
    report.say(
        f"{seconds:.0f} s, {figures['steps']} steps, {figures['in_flight']['mean']:.0f} trajectories in flight "
        f"(most {seen.most_in_flight})"
    )
    for name in CONTROL_PLANE:
        _report_lag(report, name, first, last)
    problems = lost(seen.end)
    figures["lost"] = problems
    report.ratio("lost", sum(problems.values()), Aim("<=", 0))
    report.say(f"lost: {problems or 'nothing'}")
    sent = {side: _sum(s, "heartbeats/sent_bytes") for side, s in (("first", first), ("last", last))}
    beats = _sum(last, "heartbeats/sent") - _sum(first, "heartbeats/sent")
    largest = max(actor.figures.get("heartbeats/largest_bytes", 0.0) for actor in last.actors)
    controller = _of(last, "controller/0").figures
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
    _report_cost(report, first, last)
    figures["deliver"] = _spread(first, last, "rollout/deliver_s")
    figures["repeated_deliveries"] = _sum(last, "groups/duplicate") - _sum(first, "groups/duplicate")
    figures["viewer"] = {"snapshots_per_s": seen.snapshots / seconds, "largest_gap_s": seen.largest_gap_s}
    report.say(f"viewer: {seen.snapshots / seconds:.2f} snapshots/s, largest gap {seen.largest_gap_s:.2f} s")
    if seen.top_s:
        drawn = seen.top_drawn / seen.top_s
        figures["top"] = {"cores": seen.top_cpu_s / seen.top_s, "drawn_per_s": drawn, "measured_s": seen.top_s}
        report.ratio("top_cores", seen.top_cpu_s / seen.top_s, Aim("<=", TOP_TARGET))
        report.say(
            f"asyncrl-top: {seen.top_cpu_s / seen.top_s:.3f} of a core, drew in {100 * drawn:.0f} % of all seconds"
        )


def _spread(first: Snapshot, last: Snapshot, name: str) -> dict[str, float | None]:
    """Quantiles of what all actors observed meanwhile, by upper edges of buckets."""
    before = {actor.name: actor.histograms.get(name) for actor in first.actors}
    counts = [0] * (len(EDGES[name]) + 1)
    for actor in last.actors:
        if (histogram := actor.histograms.get(name)) is not None:
            counts = [a + b for a, b in zip(counts, between(before.get(actor.name), histogram), strict=True)]
    return {f"p{share * 100:g}_s": quantile(counts, EDGES[name], share) for share in (0.5, 0.99)}


def _report_cost(report: Report, first: Snapshot, last: Snapshot) -> None:
    """Of an actor's time: its heartbeats, and a second's worth of what its event loop does for the facts."""
    before = {actor.name: actor for actor in first.actors}
    seconds = last.wall - first.wall
    shares = {}
    for actor in last.actors:
        then = before[actor.name]
        if "facts/cpu_s" in actor.figures and "facts/cpu_s" in then.figures:
            observed = sum(
                sum(between(then.histograms.get(name), histogram))
                for name, histogram in actor.histograms.items()
                if name not in COUNTED_AT_ONCE
            )
            beating = actor.figures["facts/cpu_s"] - then.figures["facts/cpu_s"]
            shares[actor.name] = (beating + observed * OBSERVED_S) / seconds
    most = max(shares, key=lambda name: shares[name])
    typical = sorted(shares.values())[len(shares) // 2]
    costs = {"observe_s": _time_of(_observing()), "enter_s": _time_of(_entering())}
    report.figures["facts"] = {"most": shares[most], "of": most, "median": typical, **costs}
    report.ratio("facts_share", shares[most], Aim("<=", FACTS_TARGET))
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


def _report_lag(report: Report, name: str, first: Snapshot, last: Snapshot) -> None:
    then, now = _of(first, name), _of(last, name)
    counts = between(then.histograms.get(LAG), now.histograms[LAG])
    edges = EDGES[LAG]
    found = {f"p{share * 100:g}_s": quantile(counts, edges, share) for share in (0.5, 0.9, 0.99, 0.999)}
    late = sum(counts[edges.index(LAG_TARGET_S) + 1 :]) / max(1, sum(counts))
    busy = now.loop_busy
    report.figures[f"lag_{name.partition('/')[0]}"] = {
        **found,
        "over_50ms_share": late,
        "samples": sum(counts),
        "loop_busy": busy,
        "cpu": now.cpu,
        "rss_bytes": now.rss_bytes,
    }
    # By buckets: the p99 lies at or below the target exactly if no more than 1 % are above it.
    report.ratio(f"lag_p99_{name.partition('/')[0]}_s", found["p99_s"] or 0.0, Aim("<=", LAG_TARGET_S))
    report.say(
        f"{name:14} lag p50 ≤ {1e3 * (found['p50_s'] or 0):g} ms, p99 ≤ {1e3 * (found['p99_s'] or 0):g} ms, "
        f"{100 * late:.2f} % over 50 ms; loop busy {100 * busy:.0f} %, {now.cpu:.2f} cores"
    )

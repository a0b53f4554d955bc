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
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ActorFailed
from asyncrl.launcher.run_folder.folders import RunFolder, create_run_folder, private_folder
from asyncrl.messages.monitor import ActorView, Interval, Snapshot
from asyncrl.observe.catalogue import edges_of, quantile
from asyncrl.top.client import Away, WatchedRun, find_target, follow
from tools.bench.report import Report, Target
from tools.live_run import simulated
from tools.waiting import wait_until

SAMPLES = 8
PROCESSES_PER_CPU = 4
CONCURRENCY = 64
"""Trajectories in flight in each rollouter, where that makes no more than MOST_IN_FLIGHT."""
MOST_IN_FLIGHT = 1 << 14
"""Trajectories in flight in the whole run: simulating more engines is to take no more processors."""
GROUPS_SHARE = 0.25
"""Share of all groups in flight that a step trains."""
STEPS = 1 << 20
"""Steps of the run, which is ended when everything is measured."""
STALENESS_MAX = 11
READY_S = 600.0
END_S = 60.0
SAY_S = 5.0
"""Interval at which it is said how far the run is."""
NAMES_SHOWN = 4
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
                return seconds >= freeze_s + SHORTEST_S and not not_ready(now) and now.run.step > last.run.step

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
    if absent := not_ready(snapshot):
        found["actors that are not ready"] = len(absent)
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


def concurrency(rollouters: int) -> int:
    return max(SAMPLES, min(CONCURRENCY, MOST_IN_FLIGHT // rollouters))


def config(folder: Path, rollouters: int) -> Config:
    """Responses of some 450 tokens that take about 40 s each."""
    groups = max(1, int(GROUPS_SHARE * rollouters * concurrency(rollouters) / SAMPLES))
    return validate_config(
        simulated(
            {
                "run": {"name": "scale", "dir": str(folder), "samples_per_step": 0},
                "data.size": 1 << 17,
                "rollout.replicas": rollouters,
                "rollout.samples_per_prompt": SAMPLES,
                "rollout.concurrency": concurrency(rollouters),
                "rollout.max_tokens": 2048,
                "rollout.stream_interval": 32,
                "rollout.sim.length": "lognormal",
                "rollout.sim.length_median": 400.0,
                "rollout.sim.length_sigma": 0.5,
                "rollout.sim.decode_step_s": 0.06,
                "rollout.sim.decode_step_per_request_s": 0.0005,
                "rollout.sim.load_s": 0.5,
                "reward.options": {"value": 0.5, "spread": 0.5},
                "learner.steps": STEPS,
                "learner.groups_per_step": groups,
                "learner.sim": {"step_s": 1.0, "publish_bytes": 1 << 20},
                "staleness": {"max": STALENESS_MAX, "adapt": False},
                "weights.max_paused_fraction": 0.25,
                "checkpoint.every_versions": 0,
                "supervision": {"drain_s": 20.0, "start_timeout_s": READY_S},
            }
        )
    )


def by_processors(rollouters: int) -> int:
    """Rollouters that share a process here, so that there are at most PROCESSES_PER_CPU of them for each processor."""
    processes = PROCESSES_PER_CPU * len(os.sched_getaffinity(0))
    return max(1, -(-rollouters // processes))


@dataclass(slots=True)
class Processes:
    """The processes that were started, each with its log."""

    folder: RunFolder
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, words: Sequence[str], *, session: bool = False) -> None:
        """Start ``python WORDS``, in a session of its own or in ours: see scale_host.py."""
        with (self.folder.logs / f"{name.replace('/', '-')}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=session,
                process_group=None if session else 0,
            )

    def actor(self, name: str, controller: str = "") -> None:
        """Start an actor as its agent would."""
        words = ["-m", "asyncrl.cli.actor", name, "--run", str(self.folder.path), "--attempt", "0"]
        words += ["--incarnation", "1"]
        self.start(name, [*words, "--controller", controller] if controller else words)

    def check(self) -> bool:
        """True if none has failed. Raises ActorFailed."""
        for name, process in self.started.items():
            if process.poll():
                log = (self.folder.logs / f"{name.replace('/', '-')}.log").read_text()
                raise ActorFailed(name, f"exit code {process.returncode}:\n{log[-2000:]}")
        return True

    @property
    def hosts(self) -> list[subprocess.Popen[bytes]]:
        return [process for name, process in self.started.items() if name.startswith("rollouters-")]

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


class Watch:
    """The snapshots of a run."""

    def __init__(
        self, snapshots: AsyncIterator[Snapshot | Away], processes: Processes, say: Callable[[str], None]
    ) -> None:
        self._snapshots, self._processes, self._say = snapshots, processes, say

    async def until(self, done: Callable[[Snapshot, float], bool], longest_s: float, what: str) -> Snapshot:
        """The first snapshot that is ``done``, which gets it and the seconds since the call. Raises ActorFailed."""
        began = said = time.monotonic()
        async for snapshot in self._snapshots:
            self._processes.check()
            if not isinstance(snapshot, Snapshot):
                continue
            now, run = time.monotonic(), snapshot.run
            if done(snapshot, now - began):
                return snapshot
            absent = run.waiting_for or not_ready(snapshot)
            how_far = f"{what}: {run.step} steps, {total(snapshot, 'rollout/in_flight'):.0f} in flight"
            if absent:
                how_far += f"; {len(absent)} not ready: {', '.join(absent[:NAMES_SHOWN])}"
            if run.phase not in ("starting", "running"):
                raise ActorFailed("the run", f"{run.reason or run.phase} ({how_far})")
            if now - began > longest_s:
                raise ActorFailed("the run", f"after {longest_s:g} s no more than this: {how_far}")
            if now - said >= SAY_S:
                said = now
                self._say(f"{now - began:6.0f} s  {how_far}")
        raise ActorFailed("the run", "the controller is gone")

    async def end(self) -> None:
        """Have the run end in good order. Raises ActorFailed."""
        self._processes.hosts[0].send_signal(signal.SIGTERM)
        await self.until(lambda now, _: now.run.phase not in ("starting", "running"), END_S, "end")


def not_ready(snapshot: Snapshot) -> list[str]:
    return [actor.name for actor in snapshot.actors if actor.condition != "ready"]


def total(snapshot: Snapshot, figure: str) -> float:
    return sum(actor.metrics.get(figure, 0.0) for actor in snapshot.actors)


@contextlib.contextmanager
def running(rollouters: int) -> Iterator[tuple[Processes, WatchedRun]]:
    """A run whose processes are all started. Raises ActorFailed, or TimeoutError after READY_S."""
    per_process = by_processors(rollouters)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True))
        chosen = config(Path(place), rollouters)
        folder = create_run_folder(chosen)
        stack.enter_context(private_folder(folder, chosen))
        processes = Processes(folder)
        try:
            processes.actor("controller/0")
            address = folder.private / "controller.json"
            wait_until(lambda: processes.check() and address.exists(), "the address of controller/0", READY_S)
            target = find_target(str(folder.path))
            for name in chosen.actors:
                if not name.startswith(("controller/", "rollouter/")):
                    processes.actor(name, target.address)
            for index, first in enumerate(range(0, rollouters, per_process)):
                count = min(per_process, rollouters - first)
                numbers = [str(number) for number in (index, first, count)]
                words = ["-m", "tools.bench.scale_host", str(folder.path), target.address, *numbers]
                processes.start(f"rollouters-{first}", words, session=True)
            yield processes, target
        except BaseException:
            processes.close(0.0)
            raise
        processes.close(END_S)

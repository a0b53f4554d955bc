"""The run that ``scale`` measures: its configuration and its processes."""

from __future__ import annotations

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
from asyncrl.messages.monitor import Snapshot
from asyncrl.top.client import Away, WatchedRun, find_target
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

    def check(self) -> None:
        for name, process in self.started.items():
            if process.poll():
                log = (self.folder.logs / f"{name.replace('/', '-')}.log").read_text()
                raise ActorFailed(name, f"exit code {process.returncode}:\n{log[-2000:]}")

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
            absent = run.waiting_for or [actor.name for actor in snapshot.actors if actor.condition != "ready"]
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


def total(snapshot: Snapshot, figure: str) -> float:
    return sum(actor.metrics.get(figure, 0.0) for actor in snapshot.actors)


def is_whole(snapshot: Snapshot) -> bool:
    return all(actor.condition == "ready" for actor in snapshot.actors)


@contextlib.contextmanager
def running(rollouters: int) -> Iterator[tuple[Processes, WatchedRun]]:
    """A run whose processes are all started."""
    per_process = by_processors(rollouters)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True))
        chosen = config(Path(place), rollouters)
        folder = create_run_folder(chosen)
        stack.enter_context(private_folder(folder, chosen))
        processes = Processes(folder)
        try:
            processes.actor("controller/0")
            target = _wait_for_controller(folder, processes)
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


def _wait_for_controller(folder: RunFolder, processes: Processes) -> WatchedRun:
    """The run, once its controller has an address. Raises ActorFailed, or TimeoutError after READY_S."""

    def found() -> bool:
        processes.check()
        return (folder.private / "controller.json").exists()

    wait_until(found, "the address of controller/0", READY_S)
    return find_target(str(folder.path))

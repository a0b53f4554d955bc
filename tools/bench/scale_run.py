"""The run that ``scale`` and ``idle`` measure: its configuration and its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ActorFailed
from asyncrl.launcher.run_folder.folders import RunFolder, create_run_folder, private_folder
from asyncrl.top.client import WatchedRun, find_target

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
IDLE_TOKENS = 1 << 20
"""Tokens of a response that takes hours."""
READY_S = 600.0
END_S = 60.0


def concurrency(rollouters: int) -> int:
    """Trajectories in flight in each rollouter."""
    return max(SAMPLES, min(CONCURRENCY, MOST_IN_FLIGHT // rollouters))


def config(folder: Path, rollouters: int, *, broadcast: bool = False, idle: bool = False) -> Config:
    """Responses of some 450 tokens that take about 40 s each. Weights come by shared memory or by ``broadcast``.

    With ``idle`` a single group is leased, which takes hours.
    """
    groups = 1 if idle else max(1, int(GROUPS_SHARE * rollouters * concurrency(rollouters) / SAMPLES))
    return validate_config(
        {
            "run": {"name": "scale", "dir": str(folder), "samples_per_step": 0},
            "data": {"source": "synthetic", "size": 1 << 17},
            "rollout": {
                "engine": "sim",
                "replicas": rollouters,
                "gpus_per_replica": 0,
                "samples_per_prompt": SAMPLES,
                "concurrency": concurrency(rollouters),
                "max_tokens": IDLE_TOKENS if idle else 2048,
                "stream_interval": 32,
                "sim": {
                    "length": "constant" if idle else "lognormal",
                    "length_median": float(IDLE_TOKENS) if idle else 400.0,
                    "length_sigma": 0.5,
                    "decode_step_s": 0.06,
                    "decode_step_per_request_s": 0.0005,
                    "load_s": 0.5,
                },
            },
            "reward": {"function": "constant", "workers": 1, "options": {"value": 0.5, "spread": 0.5}},
            "learner": {
                "backend": "sim",
                "steps": STEPS,
                "groups_per_step": groups,
                "steps_per_version": 1,
                "dynamic_sampling": False,
                "sim": {"step_s": 1.0, "publish_bytes": 1 << 20},
            },
            "staleness": {"max": 0 if idle else STALENESS_MAX, "adapt": False},
            "weights": {"max_paused_fraction": 0.25, "transport": "gloo" if broadcast else "auto"},
            "checkpoint": {"every_versions": 0, "export_at_end": False},
            "supervision": {"drain_s": 20.0, "start_timeout_s": READY_S},
            "log": {"level": "warning"},
        }
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
        """Start an actor as its agent would; the learner with a stand-in for the process groups of broadcasts."""
        stand_in = ["-m", "tools.bench.scale_collective", str(self.folder.path)]
        words = stand_in if name == "learner/0" else ["-m", "asyncrl.cli.actor"]
        words += [name, "--run", str(self.folder.path), "--attempt", "0", "--incarnation", "1"]
        self.start(name, [*words, "--controller", controller] if controller else words)

    def check(self) -> None:
        """Raise ActorFailed if any has failed."""
        for name, process in self.started.items():
            if process.poll():
                log = (self.folder.logs / f"{name.replace('/', '-')}.log").read_text()
                raise ActorFailed(name, f"exit code {process.returncode}:\n{log[-2000:]}")

    @property
    def hosts(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the rollouters."""
        return [process for name, process in self.started.items() if name.startswith("rollouters-")]

    def ask_to_end(self) -> None:
        """Have the run end in good order."""
        self.hosts[0].send_signal(signal.SIGTERM)

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


@contextlib.contextmanager
def running(
    chosen: Config, rollouters: int, per_process: int | None
) -> Iterator[tuple[RunFolder, Processes, WatchedRun]]:
    """A run whose processes are all started, with ``per_process`` rollouters in each, by default by the processors."""
    per_process = per_process or by_processors(rollouters)
    folder = create_run_folder(chosen)
    with private_folder(folder, chosen):
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
            yield folder, processes, target
        except BaseException:
            processes.close(0.0)
            raise
        processes.close(END_S)


def _wait_for_controller(folder: RunFolder, processes: Processes) -> WatchedRun:
    until = time.monotonic() + READY_S
    while not (folder.private / "controller.json").exists():
        processes.check()
        if time.monotonic() > until:
            raise ActorFailed("controller/0", f"not up after {READY_S:g} s")
        time.sleep(0.05)
    return find_target(str(folder.path))

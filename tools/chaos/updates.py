"""Kill and freeze processes of a run that updates its weights all the time, and check that the run continues.

    python -m tools.chaos.updates --engine sim --rounds 30
    python -m tools.chaos.updates --engine vllm --rounds 6 --seed 7

Each round draws a victim (a rollouter, an engine core, the parameter server, a learner rank), a signal (SIGKILL, or
SIGSTOP for a while or for good) and a moment. It waits until training has published two more versions and every
rollouter serves the second one, and prints the phase of the update that it struck. The simulated learner gathers a
version most of the time. The seed is printed. The exit code is 1 if a round does not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.core.errors import PREEMPTED_EXIT_CODE
from tools import kept
from tools.bench.tiny_model import make_model
from tools.live_run import LiveRun, UpdatePhases

SUMMARY = "Kill and freeze the processes of a run that updates its weights all the time."
START_S = 180.0
RECOVERY_S = 120.0
"""Longest time from the signal of a round until the run has recovered."""
SILENCE_S = 6.0
REPLICAS = 3
RANKS = {"sim": 2, "vllm": 1}
TRANSPORTS = ("gloo", "shm", "stream")
MODES = ("abort_resume", "keep", "drain")
ROLLING_PHASES = ("staging", "waiting", "loading")
BROADCAST_PHASES = ("announced", "paused", "receiving")
CORE = "engine core"
PHASE_S = 4.0
"""Longest wait for a phase. Some phases are rare if versions come by another transport than the chosen one."""


@dataclass(frozen=True, slots=True)
class Round:
    """The fault of one round."""

    victim: str
    core: bool
    """Strike the engine core of the victim instead of its own process."""
    signal: signal.Signals
    frozen_s: float | None
    """Seconds until a frozen victim is continued; None leaves it frozen."""
    after_s: float
    """Seconds from the round's start."""
    phase: str
    """Phase of the update to strike: of the victim, or of any replica if the victim is no rollouter."""

    def __str__(self) -> str:
        what = f"{self.signal.name} to {'the engine core of ' if self.core else ''}{self.victim}"
        if self.signal is signal.SIGSTOP:
            what += " for good" if self.frozen_s is None else f" for {self.frozen_s:.1f} s"
        return what


def plan(randomness: random.Random, engine: str, transport: str) -> Round:
    """Draw a round."""
    rollouter = f"rollouter/{randomness.randrange(REPLICAS if engine == 'sim' else 2)}"
    victims = [rollouter, "parameter_server/0", f"learner/{randomness.randrange(RANKS[engine])}"]
    victim = randomness.choice(victims + ([CORE] if engine == "vllm" else []))
    stop = randomness.random() < 0.5
    return Round(
        victim=rollouter if victim == CORE else victim,
        core=victim == CORE,
        signal=signal.SIGSTOP if stop else signal.SIGKILL,
        frozen_s=randomness.uniform(0.2, 3.0) if stop and randomness.random() < 0.5 else None,
        after_s=randomness.uniform(0.0, 2.0),
        phase=randomness.choice(("serving", *(BROADCAST_PHASES if transport == "gloo" else ROLLING_PHASES))),
    )


def configuration(engine: str, transport: str, mode: str, model: Path | None) -> dict[str, Any]:
    """Return a run without end, a version a step, with phases that are long enough to strike."""
    tree: dict[str, Any] = {
        "data": {"source": "synthetic", "size": 4096},
        "rollout": {
            "engine": engine,
            "replicas": REPLICAS if engine == "sim" else 2,
            "gpus_per_replica": 0,
            "samples_per_prompt": 2,
            "concurrency": 16,
            "max_tokens": 64,
            "on_update": mode,
            "engine_timeout_s": 8.0,
            "stream_interval": 8,
        },
        "reward": {"function": "constant", "workers": 1, "options": {"value": 0.5, "spread": 0.5}},
        "learner": {
            "ranks": RANKS[engine],
            "steps": 1_000_000,
            "groups_per_step": 8,
            "dynamic_sampling": False,
        },
        "weights": {
            "transport": transport,
            "deadline_s": 10.0,
            "broadcast_timeout_s": 5.0,
            "chunk_bytes": 1 << 20,
            "bucket_bytes": 8 << 20,
        },
        "staleness": {"max": 3},
        "network": {"call_timeout_s": 6.0},
        "supervision": {
            "heartbeat_s": 0.5,
            "silence_s": SILENCE_S,
            "max_restarts": 10_000,
            "backoff_s": 0.05,
            "restart_window_s": 1.0,
        },
        "checkpoint": {"export_at_end": False},
        "log": {"level": "debug"},
    }
    if engine == "sim":
        tree["rollout"]["sim"] = {"length_median": 24.0, "decode_step_s": 0.01, "load_s": 0.2}
        tree["learner"] |= {"backend": "sim", "sim": {"step_s": 0.5, "publish_bytes": 48 << 20, "gather_s": 0.4}}
    else:
        assert model is not None
        tree["model"] = {"path": str(model)}
        tree["data"]["max_prompt_tokens"] = 64
        tree["rollout"]["vllm"] = {"cpu_kv_cache_bytes": 64 << 20, "threads": 1}
        tree["weights"]["bucket_bytes"] = 1 << 20
        tree["supervision"]["silence_s"] = 20.0
    return tree


class Torment:
    """A run and its rounds."""

    def __init__(self, run: LiveRun, engine: str) -> None:
        self._run = run
        self._replicas = [f"rollouter/{index}" for index in range(REPLICAS if engine == "sim" else 2)]
        self.phases: Counter[str] = Counter()
        """Faults in each phase."""
        self._update_phases = UpdatePhases(run)

    def all_serve(self, version: int) -> bool:
        """Whether every replica has committed at least ``version``."""
        served = self._run.served()
        return all(served.get(name, -1) >= version for name in self._replicas)

    def go(self, round: Round) -> float:
        """Run one round and return the seconds until the run had recovered."""
        run = self._run
        time.sleep(round.after_s)
        # The victim of the last round may still be away.
        pids = run.until(lambda: self._pids(round), f"a process of {round.victim}", START_S)
        self._await_phase(round)
        struck = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, round.signal)
        newest = self._published()
        if round.frozen_s is not None:
            time.sleep(round.frozen_s)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        # The next version may have been on its way already.
        after = newest + 2
        run.until(lambda: self._published() >= after, f"training to go on past version {newest}", RECOVERY_S)
        left = RECOVERY_S - (time.monotonic() - struck)
        run.until(lambda: self.all_serve(after), f"everybody to serve version {after}", left)
        return time.monotonic() - struck

    def _pids(self, round: Round) -> list[int]:
        if round.core:
            return self._run.engine_cores(round.victim)
        pid = self._run.pid(round.victim)
        return [] if pid is None else [pid]

    def _published(self) -> int:
        """Return the newest version of the parameter server."""
        lines = self._run.log("parameter_server/0")
        return max((line["version"] for line in lines if line.get("event") == "published"), default=-1)

    def _await_phase(self, round: Round) -> None:
        """Wait for the phase. A short phase may end before the signal arrives."""
        until = time.monotonic() + PHASE_S
        while (found := self._update_phases.of(round.victim)) != round.phase and time.monotonic() < until:
            time.sleep(0.002)
        self.phases[found] += 1


def torment(
    engine: str, transport: str, mode: str, rounds: list[Round], folder: Path, model: Path | None
) -> Counter[str]:
    """Run these rounds on one run. Raises the failure of a round."""
    run = LiveRun(configuration(engine, transport, mode, model), folder)
    try:
        own = Torment(run, engine)
        run.until(lambda: run.step >= 2 and own.all_serve(1), "the run to start", START_S)
        for number, round in enumerate(rounds, 1):
            seconds = own.go(round)
            print(f"  {transport}/{mode} {number}: {round}: well after {seconds:.1f} s", flush=True)
        code = run.stop()
        if code != PREEMPTED_EXIT_CODE:
            raise RuntimeError(f"stopped with exit code {code}: {run.output[-1000:]}")
        if left := run.left():
            raise RuntimeError(f"processes are left: {left}")
        return own.phases
    finally:
        run.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos.updates", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: all, in turn")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="folder to keep the runs in")
    chosen = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    randomness = random.Random(seed)
    transports = chosen.transport or list(TRANSPORTS)
    phases: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as name:
        base = chosen.keep or Path(name)
        model = None
        if chosen.engine == "vllm":
            model = Path(name) / "model"
            make_model(model)
        for index, transport in enumerate(transports):
            count = chosen.rounds * (index + 1) // len(transports) - chosen.rounds * index // len(transports)
            mode = randomness.choice(MODES)
            folder = base / transport
            folder.mkdir(parents=True)
            rounds = [plan(randomness, chosen.engine, transport) for _ in range(count)]
            try:
                phases += torment(chosen.engine, transport, mode, rounds, folder, model)
            except Exception as error:
                print(f"FAILED with seed {seed}, {transport}/{mode}: {type(error).__name__}: {error}", flush=True)
                return 1
    print("victims were in phase: " + ", ".join(f"{phase} {count}" for phase, count in sorted(phases.items())))
    print(f"{chosen.rounds} rounds passed")
    return 0


if __name__ == "__main__":
    sys.exit(kept.run(main))

"""Carries faults out on a live run, and undoes them when their time is over.

Invariant: everything that was frozen, filled or cut for a while is undone, by ``tick`` in time or by ``lift`` at the
end.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.chaos.conditions import conditions
from tools.chaos.plan import Fault
from tools.chaos.settings import PROGRAM
from tools.chaos.world import World
from tools.live_run import LiveRun, UpdatePhases

TITLES = {"reward_worker": "asyncrl reward worker", "episode_worker": "asyncrl episodes worker", "agent": PROGRAM}
"""Titles of processes that a run has several of."""
CHECKPOINT_WAIT_S = 20.0
"""Longest wait for the start of a checkpoint."""


@dataclass(slots=True)
class Struck:
    """A fault that was carried out."""

    fault: Fault
    at_s: float
    """Seconds since the round's start."""
    struck_at: float
    """Time of the fault, on the clock of ``time.monotonic``."""
    phase: str
    step: int
    """Steps trained before the fault."""
    pids: list[int] = field(default_factory=list)
    lifts_at: float = 0.0
    """Time of its end, on the same clock."""
    recovered_s: float | None = None
    """Seconds from the fault until training continued and the victim was back."""


class Striker:
    """Carries out the faults of one run."""

    def __init__(self, run: LiveRun, world: World, seed: int) -> None:
        self._run, self._world = run, world
        self._randomness = random.Random(seed)
        self._began = time.monotonic()
        self._phases = UpdatePhases(run)
        self._over: list[tuple[float, Callable[[], None]]] = []
        """Actions that undo something, each with its time."""
        self._full_until = 0.0
        self._on_hosts: list[Fault] = []
        """Current faults of hosts."""

    def strike(self, fault: Fault, best: int) -> Struck | None:
        """Carry a fault out. ``best`` is the last step ever trained. Returns None if the victim does not live now."""
        if fault.in_checkpoint:
            self._await_checkpoint()
        now = time.monotonic()
        struck = Struck(fault, now - self._began, now, self._phase(fault), max(best, self._run.step))
        match fault.kind:
            case "everything":
                self._run.kill_everything()
                self.lift()
            case "disk":
                self._world.fill()
                self._full_until = self._after(fault)
                self._later(fault, self._world.free)
            case "cut":
                self._world.cut()
                self._later(fault, self._world.mend)
            case "reset":
                self._world.reset()
            case "partition" | "slow" | "clock":
                self._become([*self._on_hosts, fault])
                self._later(fault, lambda: self._become([other for other in self._on_hosts if other is not fault]))
            case _:
                struck.pids = pids = self.pids(fault.victim)
                if not pids:
                    return None
                _signal(pids, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                if fault.lasts_s is not None:
                    self._later(fault, lambda: _signal(pids, signal.SIGCONT))
        struck.lifts_at = self._after(fault)
        return struck

    def pids(self, victim: str) -> list[int]:
        """Return the current process of ``victim``, or None."""
        role, _, index = victim.partition("/")
        if role in TITLES:
            found = self._run.titled(TITLES[role])
            return [self._randomness.choice(found)] if found else []
        if role == "engine_core":
            return self._run.engine_cores(f"rollouter/{index}")
        pid = self._run.pid(victim)
        return [] if pid is None else [pid]

    def tick(self) -> None:
        """Undo the faults whose time is over."""
        now = time.monotonic()
        if now < self._full_until:
            self._world.fill()
        due = [action for at, action in self._over if at <= now]
        self._over = [(at, action) for at, action in self._over if at > now]
        for action in due:
            action()

    def lift(self) -> None:
        """Undo all faults now."""
        actions, self._over, self._full_until = self._over, [], 0.0
        for _, action in actions:
            action()

    def _become(self, on_hosts: list[Fault]) -> None:
        self._on_hosts = on_hosts
        self._world.hosts.become(conditions(on_hosts))

    def _later(self, fault: Fault, action: Callable[[], None]) -> None:
        self._over.append((self._after(fault), action))

    def _after(self, fault: Fault) -> float:
        return time.monotonic() + (fault.lasts_s or 0.0)

    def _phase(self, fault: Fault) -> str:
        """Return the current work of the run: a checkpoint, or the phase of a weight update."""
        return "checkpoint" if self._writes_checkpoint() else self._phases.of(fault.victim)

    def _writes_checkpoint(self) -> bool:
        return any(self._run.run_dir.glob("checkpoints/.*.partial-*"))

    def _await_checkpoint(self) -> None:
        until = time.monotonic() + CHECKPOINT_WAIT_S
        while not self._writes_checkpoint() and time.monotonic() < until and self._run.exit_code is None:
            time.sleep(0.0005)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""Carries the faults of a plan out on a live run, and undoes them when their time is over.

Invariant: everything that was frozen, filled or cut for a while is undone, by ``tick`` in time or by ``lift`` at the
end. Training must continue after each fault. If no new step is trained for ``patience_s``, the round ends with
NotRecovered, which names the last faults. After a fault of a process that takes part in weight updates, every replica
must serve a version that was gathered after the fault.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.chaos.hosts import conditions
from tools.chaos.plan import CHECKPOINT, ENDS, TURNS, UPDATED, Fault
from tools.chaos.settings import PROGRAM
from tools.chaos.turns import turn_of
from tools.chaos.world import World
from tools.live_run import LiveRun, UpdatePhases, pid_lives

TITLES = {"reward_worker": "asyncrl reward worker", "episode_worker": "asyncrl episodes worker", "agent": PROGRAM}
"""Titles of processes that a run has several of."""
CHECKPOINT_WAIT_S, PHASE_WAIT_S = 20.0, 4.0
"""Longest wait for the start of a checkpoint, and for a phase of an update."""
LOOK_S = 0.03
VICTIM_WAIT_S = 60.0
"""Longest wait for a victim that an earlier fault has ended."""
PROGRESS_STEPS = 2
"""Steps after a fault that prove that training continues; the first may have started before the fault."""
PROGRESS_VERSIONS = 2
"""Versions after a fault that prove that updates continue; the first may have been on its way before the fault."""


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
    version: int
    """Newest version published before the fault."""
    pids: list[int] = field(default_factory=list)
    lifts_at: float = 0.0
    """Time of its end, on the same clock."""
    recovered_s: float | None = None
    """Seconds from the fault until training continued, the victim was back, and every replica served again."""

    def __str__(self) -> str:
        recovered = "" if self.recovered_s is None else f"{self.recovered_s:.1f} s"
        return f"{self.at_s:7.1f}s  {self.fault!s:52}  {self.phase:12}  {self.step:5}  {recovered}"


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
        if fault.during:
            self._await(fault)
        now, phase, step = time.monotonic(), self._phase(fault), max(best, self._run.step)
        struck = Struck(fault, now - self._began, now, phase, step, self._phases.newest)
        match fault.kind:
            case "everything":
                self._run.kill_everything()
                self.lift()
            case "preempt":
                # A checkpoint of its own needs room on the disk, and all hosts.
                self.lift()
                self._run.stop(signal.SIGTERM)
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
        """Return the current processes of ``victim``; none if it does not live."""
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
        """Return the current work of the run: a phase of time slices, a checkpoint, or the phase of a weight update."""
        victim = fault.victim.replace("engine_core/", "rollouter/")
        if fault.during in TURNS:
            return turn_of(self._run, victim)
        if any(self._run.run_dir.glob("checkpoints/.*.partial-*")) and fault.during in ("", CHECKPOINT):
            return CHECKPOINT
        return self._phases.of(victim)

    def _await(self, fault: Fault) -> None:
        """Wait for what the fault is to strike in. A short phase may end before the signal arrives."""
        until = time.monotonic() + (CHECKPOINT_WAIT_S if fault.during == CHECKPOINT else PHASE_WAIT_S)
        while self._phase(fault) != fault.during and time.monotonic() < until and self._run.exit_code is None:
            self.tick()
            time.sleep(0.0005)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class NotRecovered(Exception):
    """The run makes no progress, or ended too early."""


def torment(
    run: LiveRun,
    striker: Striker,
    faults: Sequence[Fault],
    struck: list[Struck],
    *,
    replicas: int,
    in_updates: bool,
    patience_s: float,
    reported: Callable[[Struck], None],
) -> None:
    """Return when the run has ended by itself. Calls ``struck`` with each fault, then ``reported`` after its recovery.

    ``in_updates``: the run must not end before every one of its ``replicas`` serves again after the last fault.
    """
    waiting = list(faults)
    best = 0
    moved_at = time.monotonic()
    due_at: float | None = None
    missing_since: float | None = None
    try:
        while True:
            striker.tick()
            now = time.monotonic()
            if run.step > best:
                best, moved_at = run.step, now
            _note_recovered(run, struck, best, replicas, reported)
            if run.exit_code is not None:
                if in_updates and not all(_serves_again(run, one, replicas) for one in struck):
                    raise NotRecovered(f"the run ended with versions {run.served()} in its replicas{_since(struck)}")
                _note_recovered(run, struck, best, replicas, reported, ended=True)
                return
            if now - moved_at > patience_s:
                raise NotRecovered(f"nothing was trained for {patience_s:g} s after step {best}{_since(struck)}")
            if waiting and due_at is None and best >= waiting[0].after_step:
                due_at = now + waiting[0].after_s
            if due_at is not None and now >= due_at:
                found = striker.strike(waiting[0], best)
                missing_since = missing_since or now
                if found is not None:
                    struck.append(found)
                    waiting.pop(0)
                    missing_since = due_at = None
                    if found.fault.kind in ENDS:
                        run.resume()
                    # The recovery from the last fault restarts the clock.
                    moved_at = time.monotonic()
                elif now > missing_since + VICTIM_WAIT_S:
                    raise NotRecovered(f"there is no {waiting[0].victim} for {VICTIM_WAIT_S:g} s{_since(struck)}")
            time.sleep(LOOK_S)
    finally:
        striker.lift()


def _note_recovered(
    run: LiveRun,
    struck: list[Struck],
    best: int,
    replicas: int,
    reported: Callable[[Struck], None],
    *,
    ended: bool = False,
) -> None:
    now = time.monotonic()
    for one in struck:
        if one.recovered_s is not None or now < one.lifts_at:
            continue
        went_on = ended or (best >= one.step + PROGRESS_STEPS and _serves_again(run, one, replicas))
        for_good = one.fault.kind in ("kill", "freeze") and one.fault.victim != "reward_worker"
        if went_on and (ended or not for_good or not any(map(pid_lives, one.pids))):
            one.recovered_s = now - one.struck_at
            reported(one)


def _serves_again(run: LiveRun, one: Struck, replicas: int) -> bool:
    """Whether every replica has served a version that was gathered after this fault, if it struck an update."""
    served = run.served().values()
    again = len(served) == replicas and min(served) >= one.version + PROGRESS_VERSIONS
    return again or not one.fault.victim.startswith(UPDATED)


def _since(struck: list[Struck]) -> str:
    open_ones = [str(one.fault) for one in struck if one.recovered_s is None]
    return f"; not recovered from: {', '.join(open_ones)}" if open_ones else ""

"""Follows the run that ``scale`` measures through its phases, and says on stderr how far it is.

Each phase is measured by itself, from the snapshot at which it begins to that at which it is over. Every wait has a
deadline, and an error that says how far the run came.
"""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import Snapshot
from asyncrl.top.client import Viewer, WatchedRun
from tools.bench import scale_collective
from tools.bench.idle import Mark
from tools.bench.scale_run import END_S, READY_S, Processes

STEADY, FROZEN, BROKEN = "steady", "frozen", "broken"
SHORTEST_S = 20.0
"""Shortest phase: a lag every 0.1 s makes two hundred samples, so two are above the 99th percentile."""
RECOVERY_S = 300.0
"""Longest that a run may take to be as before after something was done to it."""
STEP_S = 120.0
"""Longest that a step may take."""
IN_FLIGHT_SHARE = 0.95
"""Share of the trajectories that are to be in flight: with so many the measured time begins."""
FULL_S = 300.0
"""Longest time from when all are ready to when the trajectories are in flight."""
SAY_S = 5.0
"""Interval at which it is said how far the run is."""
NAMES_SHOWN = 4


def nothing() -> None:
    """The beginning of a phase in which nothing happens."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase: ``begin`` starts it, ``is_over`` judges by its first snapshot, this one, and the seconds between."""

    name: str
    longest_s: float
    is_over: Callable[[Snapshot, Snapshot, float], bool]
    begin: Callable[[], None] = nothing
    of_the_dead: bool = False
    """Whether actors die, which are still heard of afterwards and are turned away."""


def steady(steps: int) -> Phase:
    """So many steps in which nothing happens."""

    def is_over(first: Snapshot, now: Snapshot, seconds: float) -> bool:
        return seconds >= SHORTEST_S and now.run.step - first.run.step >= steps

    return Phase(STEADY, STEP_S * steps, is_over)


def frozen(host: subprocess.Popen[bytes], seconds: float) -> Phase:
    """A host stands still for so long. Over when all of its rollouters are ready again, and a step was trained."""

    def begin() -> None:
        host.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(seconds, host.send_signal, signal.SIGCONT)

    def is_over(first: Snapshot, now: Snapshot, passed: float) -> bool:
        # An actor that is heard of again may be no more than not yet known to be dead.
        return passed >= seconds + SHORTEST_S and is_whole(now) and now.run.step > first.run.step

    return Phase(FROZEN, seconds + RECOVERY_S, is_over, begin, of_the_dead=True)


def broken(run_dir: Path) -> Phase:
    """A broadcast breaks. Over when all replicas serve what they are to serve again, and one has gone well."""

    def is_over(first: Snapshot, now: Snapshot, passed: float) -> bool:
        new = {name: _of_weights(now, name) - _of_weights(first, name) for name in ("broken", "begun")}
        is_behind = _figure(now, "weights/replicas_behind")
        return passed >= SHORTEST_S and new["broken"] >= 1 and new["begun"] > new["broken"] and not is_behind

    return Phase(BROKEN, RECOVERY_S, is_over, lambda: scale_collective.break_next(run_dir))


def is_whole(snapshot: Snapshot) -> bool:
    """Whether all actors are ready."""
    return all(actor.condition == "ready" for actor in snapshot.actors)


def _of_weights(snapshot: Snapshot, what: str) -> float:
    return _figure(snapshot, f"weights/broadcasts_{what}")


def _figure(snapshot: Snapshot, name: str) -> float:
    return next((a.metrics.get(name, 0.0) for a in snapshot.actors if a.name == "parameter_server/0"), 0.0)


@dataclass(slots=True)
class Seen:
    """The record of a phase."""

    phase: Phase
    first: Snapshot
    last: Snapshot
    snapshots: int = 0
    largest_gap_s: float = 0.0
    """Longest time between two snapshots."""
    in_flight: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Watched:
    """The record of the run."""

    phases: list[Seen] = field(default_factory=list)
    ready_s: float = 0.0
    """Seconds from the start of the first process until all actors were ready."""
    marks: list[Mark] = field(default_factory=lambda: [Mark(0.0)])
    """How many actors were ready when, until all were."""
    first_step_s: float = 0.0
    """Seconds from that start until a step was trained."""


class Follower:
    """The follower of one run, to be made when the first process is started."""

    def __init__(
        self,
        actors: int,
        wanted: int,
        phases: Sequence[Phase],
        *,
        say: Callable[[str], None],
        over: Callable[[Seen], None],
    ) -> None:
        """``actors`` are those that the run begins with, the controller excluded; ``wanted`` trajectories are to be in
        flight; ``say`` prints the progress; ``over`` is given each phase when it is measured.
        """
        self._actors, self._wanted, self._left, self._say, self._over = actors, wanted, list(phases), say, over
        self._began = self._since = self._at = time.monotonic()
        """Times at which the first process was started, the present wait began, and the last snapshot came."""
        self._said = self._began
        self.watched = Watched()

    def see(self, snapshot: Snapshot, now: float) -> bool:
        """Take in a snapshot; whether everything is measured. Raises ActorFailed where it takes too long."""
        watched, run = self.watched, snapshot.run
        if run.phase != "running" and run.phase != "starting":
            raise ActorFailed("the run", run.reason or f"{run.phase} before everything was measured")
        if not watched.ready_s and run.phase == "running":
            watched.ready_s, self._since = now - self._began, now
            watched.marks.append(Mark(watched.ready_s, ready=self._actors))
        if not watched.first_step_s and run.step:
            watched.first_step_s = now - self._began
        in_flight = total(snapshot, "rollout/in_flight")
        if not watched.ready_s:
            ready = self._actors - len(run.waiting_for)
            watched.marks.append(Mark(now - self._began, ready=ready))
            self._wait(now, READY_S, f"{ready} of {self._actors} actors ready", _some(run.waiting_for))
        elif not watched.phases:
            if in_flight >= IN_FLIGHT_SHARE * self._wanted and run.step:
                self._begin_phase(snapshot, now)
            else:
                said = f"{in_flight:.0f} of {self._wanted} trajectories in flight, {run.step} steps"
                self._wait(now, FULL_S, said)
        else:
            seen = watched.phases[-1]
            seen.largest_gap_s = max(seen.largest_gap_s, now - self._at)
            seen.snapshots += 1
            seen.last = snapshot
            seen.in_flight.append(in_flight)
            if seen.phase.is_over(seen.first, snapshot, now - self._since):
                self._over(seen)
                if not self._left:
                    return True
                self._begin_phase(snapshot, now)
            else:
                absent = [actor.name for actor in snapshot.actors if actor.condition != "ready"]
                said = f"{seen.phase.name}: {run.step - seen.first.run.step} steps, {in_flight:.0f} in flight"
                self._wait(now, seen.phase.longest_s, said, _some(absent))
        self._at = now
        return False

    def _begin_phase(self, snapshot: Snapshot, now: float) -> None:
        phase = self._left.pop(0)
        self.watched.phases.append(Seen(phase, snapshot, snapshot))
        self._since = now
        self._say(f"{now - self._began:6.0f} s  {phase.name} begins")
        phase.begin()

    def _wait(self, now: float, longest_s: float, how_far: str, absent: str = "") -> None:
        how_far += f"; not ready: {absent}" if absent else ""
        if now - self._since > longest_s:
            raise ActorFailed("the run", f"after {longest_s:g} s no more than this: {how_far}")
        if now - self._said >= SAY_S:
            self._said = now
            self._say(f"{now - self._began:6.0f} s  {how_far}")


async def follow(target: WatchedRun, processes: Processes, follower: Follower) -> Watched:
    """Follow the run until everything is measured and it is over. Raises ActorFailed."""
    ends_by = math.inf
    with Viewer(target) as viewer:
        async for snapshot in viewer.snapshots():
            processes.check()
            if not isinstance(snapshot, Snapshot):
                continue
            if ends_by == math.inf:
                if follower.see(snapshot, time.monotonic()):
                    ends_by = time.monotonic() + END_S
                    processes.ask_to_end()
            elif snapshot.run.phase not in ("starting", "running"):
                return follower.watched
            elif time.monotonic() > ends_by:
                raise ActorFailed("the run", f"is {snapshot.run.phase} {END_S:g} s after it was asked to end")
    raise ActorFailed("the run", "the controller is gone")


def total(snapshot: Snapshot, figure: str) -> float:
    """Sum of a figure over all actors."""
    return sum(actor.metrics.get(figure, 0.0) for actor in snapshot.actors)


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

"""Follows the run that ``scale`` measures, says on stderr how far it is, and keeps what was seen of it.

Everything that is waited for has a deadline, and an error that says how far it came.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import Snapshot
from asyncrl.top.client import Viewer, WatchedRun
from tools.bench.scale_idle import Mark
from tools.bench.scale_phases import Phase
from tools.bench.scale_run import END_S, READY_S, Processes
from tools.bench.scale_top import Drawing, Top

IN_FLIGHT_SHARE = 0.95
"""Share of the trajectories that are to be in flight: with so many the measured time begins."""
FULL_S = 300.0
"""Longest time from when all are ready to when the trajectories are in flight."""
SAY_S = 5.0
"""Interval at which it is said how far the run is."""
NAMES_SHOWN = 4


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
    drawing: Drawing | None = None
    """Figures of asyncrl-top in the first phase."""


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


async def follow(target: WatchedRun, processes: Processes, follower: Follower, *, top: bool) -> Watched:
    """Follow the run until everything is measured and it is over. Raises ActorFailed."""
    watched, screen, ends_by = follower.watched, None, math.inf
    with Viewer(target) as viewer:
        try:
            async for snapshot in _snapshots(viewer, processes):
                if ends_by < math.inf:
                    if snapshot.run.phase not in ("starting", "running"):
                        return watched
                    if time.monotonic() > ends_by:
                        raise ActorFailed("the run", f"is {snapshot.run.phase} {END_S:g} s after it was asked to end")
                    continue
                is_measured = follower.see(snapshot, time.monotonic())
                if top and screen is None and watched.phases:
                    assert target.run_dir is not None
                    screen = Top(target.run_dir)
                elif screen is not None and len(watched.phases) == 1:
                    watched.drawing = screen.drawing()
                if is_measured:
                    if top and watched.drawing is None:
                        raise ActorFailed("asyncrl-top", "drew nothing")
                    ends_by = time.monotonic() + END_S
                    processes.hosts[0].send_signal(signal.SIGTERM)
        finally:
            if screen is not None:
                await asyncio.to_thread(screen.close)
    raise ActorFailed("the run", "the controller is gone")


async def _snapshots(viewer: Viewer, processes: Processes) -> AsyncIterator[Snapshot]:
    async for news in viewer.snapshots():
        processes.check()
        if isinstance(news, Snapshot):
            yield news


def total(snapshot: Snapshot, figure: str) -> float:
    """Sum of a figure over all actors."""
    return sum(actor.metrics.get(figure, 0.0) for actor in snapshot.actors)


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

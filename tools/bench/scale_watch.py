"""Follows the run that ``scale`` measures, and keeps what was seen of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from asyncrl.errors import ActorFailed
from asyncrl.monitor.client import Target, Viewer
from asyncrl.snapshot import Snapshot
from tools.bench.scale_run import Processes
from tools.bench.scale_top import Drawing, Top

IN_FLIGHT_SHARE = 0.95
"""Of the trajectories that are to be in flight: with fewer than that the measured time is over."""
RUN_S = 1800.0


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
    drawing: Drawing | None = None


async def follow(target: Target, processes: Processes, wanted: int, *, top: bool) -> Watched:
    """Until the run is over. Raises ActorFailed."""
    seen: Watched | None = None
    screen: Top | None = None
    at, over = time.monotonic(), False
    with Viewer(target) as viewer:
        try:
            async for snapshot in _snapshots(viewer, processes):
                now = time.monotonic()
                in_flight = total(snapshot, "rollout/in_flight")
                if seen is None:
                    if snapshot.run.phase == "running" and in_flight >= wanted:
                        seen = Watched(snapshot, snapshot, snapshot)
                        if top:
                            assert target.run_dir is not None
                            screen = Top(target.run_dir)
                elif snapshot.run.phase == "running":
                    seen.end = snapshot
                    over = over or in_flight < IN_FLIGHT_SHARE * wanted
                    if not over:
                        seen.largest_gap_s = max(seen.largest_gap_s, now - at)
                        seen.snapshots += 1
                        seen.last = snapshot
                        seen.most_in_flight = max(seen.most_in_flight, int(in_flight))
                        seen.in_flight.append(in_flight)
                        if screen is not None:
                            seen.drawing = screen.drawing()
                at = time.monotonic()
                if snapshot.run.phase not in ("starting", "running"):
                    if snapshot.run.exit_code:
                        raise ActorFailed("the run", snapshot.run.reason)
                    if seen is None:
                        raise ActorFailed("the run", f"over before {wanted} trajectories were in flight")
                    if top and seen.drawing is None:
                        raise ActorFailed("asyncrl-top", "drew nothing")
                    return seen
        finally:
            if screen is not None:
                await asyncio.to_thread(screen.close)
    raise ActorFailed("the run", "the controller is gone")


async def _snapshots(viewer: Viewer, processes: Processes) -> AsyncIterator[Snapshot]:
    async with asyncio.timeout(RUN_S):
        async for news in viewer.snapshots():
            processes.check()
            if isinstance(news, Snapshot):
                yield news


def total(snapshot: Snapshot, figure: str) -> float:
    """Of all actors."""
    return sum(actor.figures.get(figure, 0.0) for actor in snapshot.actors)

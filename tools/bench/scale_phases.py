"""The phases of the run that ``scale`` measures: how each begins, and when it is over. Decisions are pure.

Each is measured by itself, from the snapshot at which it begins to that at which it is over.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.messages.snapshot import Snapshot
from tools.bench import scale_collective

STEADY, FROZEN, BROKEN = "steady", "frozen", "broken"
SHORTEST_S = 20.0
"""Shortest phase: a lag every 0.1 s makes two hundred samples, so two are above the 99th percentile."""
RECOVERY_S = 300.0
"""Longest that a run may take to be as before after something was done to it."""
STEP_S = 120.0
"""Longest that a step may take."""


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

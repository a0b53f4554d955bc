"""Faults that end a worker: its event loop stands still, it takes too much memory, or an episode does not end.

Where a stopped episode does not end though the loop turns, that episode is guilty, and the others are known to be
innocent; in all other cases nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.episode import EpisodeConfig
from asyncrl.episodes.slots import Slot
from asyncrl.runtime.workers.memory import family, proportional_bytes, resident_bytes

MEMORY_KEY = "episode.max_memory_bytes"


@dataclass(frozen=True, slots=True)
class Fault:
    """``reason`` has the worker as its subject; ``guilty`` is the session that is to blame, if that is known."""

    kind: Literal["stalled", "memory", "stopped"]
    reason: str
    guilty: str = ""


def silence(silent_s: float, *, heard: float, since: float, now: float, pause_s: float) -> float:
    """Seconds that a worker was silent by the look at ``now``, if it was ``silent_s`` at that of ``since``.

    Time in which this process did not run either, as it shows by looks that are late, is nobody's silence. Pure.
    """
    return 0.0 if heard >= since else silent_s + min(now - since, 2 * pause_s)


def find_fault(slot: Slot, config: EpisodeConfig, now: float) -> Fault | None:
    """The first fault that there is."""
    assert slot.process is not None
    if slot.silent_s > config.stall_timeout_s:
        return Fault(
            "stalled",
            f"stood still for {config.stall_timeout_s:g} s (episode.stall_timeout_s): code that is async computes or "
            "waits without await, or holds the interpreter; it was killed",
        )
    pids = family(slot.process.pid)
    # Shared pages count more than once in the first, which costs next to nothing.
    if resident_bytes(pids) > slot.memory_limit and (held := proportional_bytes(pids)) > slot.memory_limit:
        return Fault(
            "memory",
            f"took more than {config.max_memory_bytes} bytes of memory ({MEMORY_KEY}; it and {len(pids) - 1} processes "
            f"below it held {held}); it was killed",
        )
    return unended(slot, config.close_timeout_s, now)


def unended(slot: Slot, close_timeout_s: float, now: float) -> Fault | None:
    """An episode that was told to end and has not. Pure."""
    for key, opened in slot.open.items():
        if opened.stopped and now - opened.stopped > close_timeout_s:
            turns = slot.heard > opened.stopped + close_timeout_s / 2
            reason = f"did not end within {close_timeout_s:g} s of being told to (episode.close_timeout_s)"
            return Fault("stopped", f"was killed because of an episode that {reason}", key if turns else "")
    return None

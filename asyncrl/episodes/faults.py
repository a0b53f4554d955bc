"""Workers of a host and their faults: the event loop stands still, it takes too much memory, an episode does not end.

Where a stopped episode does not end though the loop turns, that episode is guilty, and the others are known to be
innocent; in all other cases nobody knows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.episode import EpisodeConfig
from asyncrl.episodes.session import Playing, PolicySession
from asyncrl.telemetry.states import StateLedger
from asyncrl.workers.memory import held_beyond
from asyncrl.workers.process import WorkerProcess

MEMORY_KEY = "episode.max_memory_bytes"
SUSPECT_DEATHS = 2
"""Deaths from which on an episode is played alone."""
MOST = 4096
"""Episodes that are remembered, the newest."""


@dataclass(eq=False, slots=True)
class Open:
    """An episode that was begun or waits for a worker. Workers alone change it, and the slots."""

    session: PolicySession
    playing: Playing
    stopped: float = 0.0
    """Time when it was told to end; 0 where it was not."""


@dataclass(eq=False, slots=True)
class Slot:
    """The place of one worker; its processes come and go. A lone one is for one episode."""

    lone: bool = False
    ledger: StateLedger = field(default_factory=lambda: StateLedger(time.monotonic, "player"))
    process: WorkerProcess | None = None
    launched: float = 0.0
    """Time when its process was started."""
    is_ready: bool = False
    open: dict[str, Open] = field(default_factory=dict)
    heard: float = 0.0
    """Time when it was heard of last."""
    silent_s: float = 0.0
    """Seconds for which it has not been heard of, as far as this process was there to hear."""
    guilty: str = ""
    """Session for which it is killed, where that is known."""
    memory_limit: int = 0
    telling: asyncio.TimerHandle | None = None
    """Timer that hands out the gathered output."""
    failed_starts: int = 0
    restart: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class EpisodeFault:
    """``reason`` has the worker as its subject; ``guilty`` is the session that is to blame, if that is known."""

    kind: Literal["stalled", "memory", "stopped"]
    reason: str
    guilty: str = ""


def silence(silent_s: float, *, heard: float, since: float, now: float, pause_s: float) -> float:
    """Seconds that a worker was silent by the look at ``now``, if it was ``silent_s`` at that of ``since``.

    Time in which this process did not run either, as it shows by looks that are late, is nobody's silence. Pure.
    """
    return 0.0 if heard >= since else silent_s + min(now - since, 2 * pause_s)


def find_fault(slot: Slot, config: EpisodeConfig, now: float) -> EpisodeFault | None:
    """The first fault that there is."""
    assert slot.process is not None
    if slot.silent_s > config.stall_timeout_s:
        return EpisodeFault(
            "stalled",
            f"stood still for {config.stall_timeout_s:g} s (episode.stall_timeout_s): code that is async computes or "
            "waits without await, or holds the interpreter; it was killed",
        )
    if (found := held_beyond(slot.process.pid, slot.memory_limit)) is not None:
        held, below = found
        told = f"took more than {config.max_memory_bytes} bytes of memory ({MEMORY_KEY}; it and {below} processes"
        return EpisodeFault("memory", f"{told} below it held {held}); it was killed")
    return unended(slot, config.close_timeout_s, now)


def unended(slot: Slot, close_timeout_s: float, now: float) -> EpisodeFault | None:
    """An episode that was told to end and has not. Pure."""
    for key, opened in slot.open.items():
        if opened.stopped and now - opened.stopped > close_timeout_s:
            # Heard in the second half of the time: the loop turns, so it is this episode that does not end.
            turns = slot.heard > opened.stopped + close_timeout_s / 2
            reason = f"did not end within {close_timeout_s:g} s of being told to (episode.close_timeout_s)"
            return EpisodeFault("stopped", f"was killed because of an episode that {reason}", key if turns else "")
    return None


class Suspects:
    """Blame for the deaths of workers: deaths counted by episode id, over its attempts. Pure.

    A worker plays many episodes, most of which are innocent of its end. So an episode that was in two deaths is played
    in a worker by itself, and only a death there is its own. Invariant: an episode that never ends its worker is never
    blamed.
    """

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}

    def died(self, inside: Iterable[str]) -> None:
        """Count the death of a worker, of unknown cause, with these episodes in it."""
        for episode in inside:
            # Put behind the others: the one that is forgotten is the one whose last death is the oldest.
            self._deaths[episode] = self._deaths.pop(episode, 0) + 1
            if len(self._deaths) > MOST:
                del self._deaths[next(iter(self._deaths))]

    def alone(self, episode: str) -> bool:
        """Whether an episode is to be played in a worker by itself."""
        return self._deaths.get(episode, 0) >= SUSPECT_DEATHS

    def ended(self, episode: str) -> None:
        """Forget an episode that has ended and whose worker lives."""
        self._deaths.pop(episode, None)

    def __len__(self) -> int:
        return len(self._deaths)

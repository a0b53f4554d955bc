"""The records of the host's workers: an episode that is played, and the place of a worker. Workers alone change
them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from asyncrl.episodes.session import Playing, Session
from asyncrl.monitor.states import StateLedger
from asyncrl.runtime.workers.process import WorkerProcess


@dataclass(eq=False, slots=True)
class Open:
    """An episode that was begun or waits for a worker."""

    session: Session
    playing: Playing
    stopped: float = 0.0
    """Time when it was told to end; 0 where it was not."""


@dataclass(eq=False, slots=True)
class Slot:
    """The place of one worker; its processes come and go. A lone one is for one episode."""

    ledger: StateLedger
    lone: bool = False
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

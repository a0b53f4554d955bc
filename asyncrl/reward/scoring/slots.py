"""The records of the pool: a task on its way to its rewards, the place of a worker, and counts.

The pool alone changes them (pool.py). Invariant: a task that is cancelled is made known to the pool, once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError
from asyncrl.messages.reward import Score, Scores
from asyncrl.telemetry.states import StateLedger
from asyncrl.workers.process import WorkerProcess

if TYPE_CHECKING:
    from asyncrl.reward.scoring.pool import RewardPool


class Pending(asyncio.Future[Scores]):
    """A task from its submission to its rewards. ``size`` is in bytes, as it goes to the worker ``slot``."""

    __slots__ = ("pool", "request", "size", "slot")

    pool: RewardPool
    request: Score
    slot: RewardSlot | None
    size: int

    def fail(self, error: AsyncRLError) -> None:
        if not self.done():
            self.pool.counters.failed += 1
            self.set_exception(error)

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.pool.forsake(self)
        return cancelled


@dataclass(eq=False, slots=True)
class RewardSlot:
    """The place of one worker; its processes come and go."""

    ledger: StateLedger
    ready: asyncio.Future[None]
    process: WorkerProcess | None = None
    is_ready: bool = False
    """Whether its process has the function."""
    given: deque[Pending] = field(default_factory=deque)
    """Tasks not answered yet; the worker is at the first."""
    given_bytes: int = 0
    pace: float = math.inf
    """Recent seconds of a task."""
    low: int = 0
    """Number of given tasks at or below which it is fed."""
    began: float = 0.0
    """Time at which the first of the given could begin."""
    forsaken: float = math.inf
    """Time at which the first of the given could begin or was cancelled, the later one, if nobody waits for it."""
    late: bool = False
    """Whether it has given back the tasks that were sent ahead."""
    timer: asyncio.TimerHandle | None = None
    due: float = 0.0
    """Time at which the timer comes."""
    timed_out: bool = False
    """Whether its process is killed because the first of the given ran over its time."""
    memory_limit: int = 0
    """Bytes for the process and all that it has started."""
    last_uid: str = ""
    """Uid of the task that was answered last."""
    failed_starts: int = 0
    restart: asyncio.TimerHandle | None = None
    start_timer: asyncio.TimerHandle | None = None
    """Timer that ends its process while that is not ready."""


@dataclass(slots=True)
class PoolCounters:
    """Counts since the start. A task is one call of ``score``."""

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    """Tasks that ran over their time: failed, or scored where reward.on_timeout is a number."""
    out_of_memory: int = 0
    """Worker processes ended because of reward.max_memory_bytes."""
    output_dropped_bytes: int = 0
    """Bytes printed beyond reward.max_output_bytes."""
    workers_killed: int = 0
    """Worker processes ended by the pool, because of a timeout, memory, a cancelled task or a broken answer."""
    workers_died: int = 0
    """Worker processes that ended by themselves."""

"""Repeats calls whose peer is away: the pauses, and the log lines.

Invariant of ``pause``: that after the n-th time is above 0 and at most ``first_s`` doubled n times, DOUBLINGS times
at most, and spread evenly below that, so that those who wait on the same peer do not ask at the same moment. The draw
comes from the caller's own source, which is seeded: the same caller asks at the same times.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.core.errors import RemoteError, WireError
from asyncrl.observe.logging import Logger

AWAY_S = 0.5
"""Pause before a peer that does not answer, or cannot serve the call yet, is asked again."""
LONGEST_AWAY_S = 10.0
"""Longest pause before one that is tried without end."""
DOUBLINGS = 3
CANCELLED = "cancelled"
"""Code of the answer to a call that an actor can no longer carry out, because it is ending."""
DEADLINE = "deadline"
"""Code of the answer to a call whose handler ran past its time; another may be answered within its own."""


def pause(first_s: float, times: int, draw: float) -> float:
    """Seconds until the next time, after ``times`` before it; ``draw`` is from [0, 1)."""
    return first_s * 2.0 ** min(times, DOUBLINGS) * (1.0 - draw)


def log_away(log: Logger, whom: str, error: WireError, **facts: Any) -> None:
    """Log a warning, or less if the peer is ending, which is no trouble."""
    ending = isinstance(error, RemoteError) and error.code == CANCELLED
    (log.info if ending else log.warning)(f"{whom} is away", error=str(error), **facts)


async def wait_out(log: Logger, whom: str, error: WireError, **facts: Any) -> None:
    """Say that a peer is away, and give it AWAY_S."""
    log_away(log, whom, error, **facts)
    await asyncio.sleep(AWAY_S)


def is_refusal(error: WireError) -> bool:
    """Whether a peer that is there will never answer the call otherwise."""
    return isinstance(error, RemoteError) and not (error.retryable or error.code == DEADLINE)

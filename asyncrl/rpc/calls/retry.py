"""Pauses before something that failed is tried again, and the log lines on a peer that is away.

Each pause is twice as long as the one before, up to a limit (``backoff``). Actors that wait for the same peer must not
ask at the same moment, so ``pause`` spreads their pauses evenly between 0 and that length. The random numbers come from
the caller's own seeded generator: the same caller asks at the same times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from itertools import count
from typing import Any, TypeVar

from asyncrl.core.errors import DeadlineExceeded, RemoteError, WireError
from asyncrl.observe.logging import Logger

T = TypeVar("T")

AWAY_S = 0.5
"""Pause before a peer that does not answer, or cannot serve the call yet, is asked again (s)."""
LONGEST_AWAY_S = 10.0
"""Longest pause between tries of a peer that is tried without end (s)."""
LONGEST_S = 60.0
"""Default for the longest pause of ``backoff`` (s)."""
MOST_DOUBLINGS = 64
"""Bound of the exponent, so that the power never overflows a float; the pause exceeds every limit long before."""
DOUBLINGS = 3
"""Largest number of times that ``pause`` doubles."""
CANCELLED = "cancelled"
"""Code of the answer to a call that an actor cannot carry out because it is ending."""
DEADLINE = "deadline"
"""Code of the answer to a call whose handler ran past the deadline; another call may be answered in time."""


def backoff(first_s: float, times: int, longest_s: float = LONGEST_S) -> float:
    """Seconds to pause after ``times`` earlier pauses: ``first_s`` doubled each time, up to ``longest_s``.

    If ``first_s`` is longer than ``longest_s``, every pause is ``first_s``.
    """
    return min(first_s * 2.0 ** min(times, MOST_DOUBLINGS), max(first_s, longest_s))


def backoffs(first_s: float, longest_s: float = LONGEST_S) -> Iterator[float]:
    """The endless sequence of pauses of ``backoff``, from the first on."""
    return (backoff(first_s, times, longest_s) for times in count())


def pause(first_s: float, times: int, draw: float) -> float:
    """Seconds to pause after ``times`` earlier pauses, with full jitter: above 0, up to ``first_s`` doubled each time.

    The upper end doubles DOUBLINGS times at most. ``draw`` is a random number from [0, 1).
    """
    return first_s * 2.0 ** min(times, DOUBLINGS) * (1.0 - draw)


def log_away(log: Logger, whom: str, error: WireError, **facts: Any) -> None:
    """Log that a peer does not answer: as a warning, or as info if it said that it is ending."""
    ending = isinstance(error, RemoteError) and error.code == CANCELLED
    (log.info if ending else log.warning)(f"{whom} is away", error=str(error), **facts)


async def log_and_pause(log: Logger, whom: str, error: WireError, **facts: Any) -> None:
    """Log that a peer does not answer, and sleep for AWAY_S."""
    log_away(log, whom, error, **facts)
    await asyncio.sleep(AWAY_S)


async def reply_unless_away(call: Awaitable[T], log: Logger, whom: str, **facts: Any) -> T | None:
    """Wait for the reply of a call. Returns None, after a pause, if the peer is away: call again. Raises a refusal."""
    try:
        return await call
    except (DeadlineExceeded, RemoteError) as error:
        if is_refusal(error):
            raise
        await log_and_pause(log, whom, error, **facts)
        return None


def is_refusal(error: WireError) -> bool:
    """Whether the peer answered with an error that a repeated call would get again."""
    return isinstance(error, RemoteError) and not (error.retryable or error.code == DEADLINE)

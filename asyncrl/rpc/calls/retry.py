"""Pauses before something that failed is tried again, and the log lines on a peer that is away.

Each pause is twice as long as the one before, up to a longest (``backoff``). Actors that wait on the same peer must not
ask at the same moment, so ``pause`` spreads them evenly between 0 and that. The draw comes from the caller's own
source, which is seeded: the same caller asks at the same times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

from asyncrl.core.errors import RemoteError, WireError
from asyncrl.observe.logging import Logger

AWAY_S = 0.5
"""Pause before a peer that does not answer, or cannot serve the call yet, is asked again."""
LONGEST_AWAY_S = 10.0
"""Longest pause before one that is tried without end."""
LONGEST_S = 60.0
"""Longest pause of ``backoff``, where its caller gives none."""
MOST_DOUBLINGS = 64
"""Bound of the exponent: a float takes so many of any seconds, and they are longer than any longest."""
DOUBLINGS = 3
CANCELLED = "cancelled"
"""Code of the answer to a call that an actor can no longer carry out, because it is ending."""
DEADLINE = "deadline"
"""Code of the answer to a call whose handler ran past its time; another may be answered within its own."""


def backoff(first_s: float, times: int, longest_s: float = LONGEST_S) -> float:
    """Seconds until the next try, after ``times`` pauses before this one; a first pause above ``longest_s`` stays."""
    return min(first_s * 2.0 ** min(times, MOST_DOUBLINGS), max(first_s, longest_s))


def backoffs(first_s: float, longest_s: float = LONGEST_S) -> Iterator[float]:
    """All pauses, from the first on."""
    return (backoff(first_s, times, longest_s) for times in count())


def pause(first_s: float, times: int, draw: float) -> float:
    """Seconds until the next time, after ``times`` before it; ``draw`` is from [0, 1)."""
    return backoff(first_s, times, first_s * 2.0**DOUBLINGS) * (1.0 - draw)


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

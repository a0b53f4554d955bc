"""Limits on the requests to a judge at once and in a minute.

``MinuteLimit`` is pure. Invariant: in any 60 seconds no more than the limit begins, except a single larger item, which
begins alone. ``JudgeLimits`` lets requests begin in the order in which they came. A request that the client sends again
counts, and does not wait. Waiting is bounded by the limits themselves and ends when the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(slots=True)
class Spent:
    """Units that began at a time."""

    at: float
    units: float


class MinuteLimit:
    """At most ``limit`` units in any minute; None is no limit. Times are in seconds."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._spent: deque[Spent] = deque()

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until ``units`` may begin; 0 if they may now."""
        if self._limit is None:
            return 0.0
        while self._spent and self._spent[0].at + MINUTE_S <= now:
            self._spent.popleft()
        over = sum(spent.units for spent in self._spent) + units - self._limit
        until = now
        for spent in self._spent:
            if over <= 0:
                break
            over -= spent.units
            until = spent.at + MINUTE_S
        return until - now

    def begin(self, units: float, now: float) -> Spent:
        """Note units that begin; the record that is returned may be corrected once their number is known."""
        spent = Spent(now, units)
        if self._limit is not None:
            self._spent.append(spent)
        return spent


class JudgeLimits:
    """The limits of all requests to one judge."""

    def __init__(
        self,
        concurrency: int,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self._places = asyncio.Semaphore(concurrency)
        self._door = asyncio.Lock()
        self._requests, self._tokens = MinuteLimit(requests_per_minute), MinuteLimit(tokens_per_minute)
        self.waiting = 0

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[Spent]:
        """A turn for one request of about ``tokens`` tokens, during the context."""
        self.waiting += 1
        waits = True
        try:
            async with self._places:
                # One waits at a time, the others behind it: a small request does not slip past a large one.
                async with self._door:
                    # Others that were sent again meanwhile make it longer.
                    while (wait_s := self._wait_s(tokens)) > 0:  # noqa: ASYNC110
                        await asyncio.sleep(wait_s)
                    self._requests.begin(1, time.monotonic())
                    spent = self._tokens.begin(tokens, time.monotonic())
                self.waiting -= 1
                waits = False
                yield spent
        finally:
            self.waiting -= waits

    def retried(self, tokens: float) -> None:
        """Count a request that was sent again, which did not wait."""
        now = time.monotonic()
        self._requests.begin(1, now)
        self._tokens.begin(tokens, now)

    def _wait_s(self, tokens: int) -> float:
        now = time.monotonic()
        return max(self._requests.wait_s(1, now), self._tokens.wait_s(tokens, now))

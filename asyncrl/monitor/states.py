"""State-time ledgers: in which state a serial resource has spent its life.

Invariant: the times of all states add up to the time since the ledger was made; there is no gap and no overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class StateLedger:
    """Seconds spent in each state. Safe to read from other threads."""

    def __init__(self, now: Callable[[], float], state: str = "starting") -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since = now()
        self.state = state
        self.awaiting = ""
        """Whom or what the state waits for; empty when it waits for nothing."""

    def enter(self, state: str, awaiting: str = "") -> None:
        """Be in ``state`` from now on."""
        with self._lock:
            now = self._now()
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
            self._since, self.state, self.awaiting = now, state, awaiting

    def present(self) -> tuple[str, str, float]:
        """The state, whom or what it waits for, and the seconds since it was entered."""
        with self._lock:
            return self.state, self.awaiting, self._now() - self._since

    def totals(self) -> dict[str, float]:
        """Seconds by state up to now; their sum is the age of the ledger."""
        with self._lock:
            totals = dict(self._seconds)
            totals[self.state] = totals.get(self.state, 0.0) + self._now() - self._since
            return totals

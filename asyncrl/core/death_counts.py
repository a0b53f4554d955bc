"""Counts of the deaths of processes (a rollouter, an engine, a worker of an episode host) by what they generated. Pure.

**Suspects** are prompts, or episodes, that were being generated when a process died. Most of them did not cause the
death. After ALONE_FROM deaths a suspect runs alone, so it causes every later death itself. With
``rollout.max_attempts`` such deaths of its own a prompt is quarantined. One number holds all of this: the deaths of a
suspect. Deaths in company count up to ALONE_FROM only, so the part above ALONE_FROM counts its own. The number of a
prompt travels with its lease (``Lease.attempt``), and the learner's ledger keeps it.
"""

from __future__ import annotations

import sys

ALONE_FROM = 2
"""Number of deaths after which a suspect runs alone."""


def runs_alone(deaths: int) -> bool:
    """Whether a suspect with so many deaths must be generated alone."""
    return deaths >= ALONE_FROM


class DeathCounts:
    """Numbers of deaths by key: the uid of a prompt, or the id of an episode."""

    def __init__(
        self, deaths: dict[str, int] | None = None, *, max_attempts: int = sys.maxsize, most: int = sys.maxsize
    ) -> None:
        """Keep the numbers in ``deaths``, which this object then changes.

        A key fails after ``max_attempts`` deaths while it ran alone. If there are more than ``most`` keys, the one
        whose last death is the oldest is forgotten.
        """
        self._deaths = {} if deaths is None else deaths
        self._reasons: dict[str, str] = {}
        """Reason of the last death by key."""
        self._max_attempts, self._most = max_attempts, most
        self.changes = 0
        """Number of changes to the numbers so far."""

    def __len__(self) -> int:
        return len(self._deaths)

    def number(self, key: str) -> int:
        """Number of deaths counted against a key."""
        return self._deaths.get(key, 0)

    def raise_to(self, key: str, number: int) -> None:
        """Raise the number of a key to ``number``, if it is lower."""
        if number > self.number(key):
            self._deaths[key] = number
            self.changes += 1

    def died(self, key: str, *, alone: bool, reason: str = "") -> None:
        """Count the death of a process that generated this key, ``alone`` or with others."""
        # Moved to the end, so that the first key is the one to forget.
        deaths = self._deaths.pop(key, 0)
        # Deaths in company count up to ALONE_FROM only.
        counts = alone or not runs_alone(deaths)
        self._deaths[key] = deaths + counts
        self._reasons[key] = reason
        self.changes += counts
        if len(self) > self._most:
            self.forget(next(iter(self._deaths)))

    def forget(self, key: str) -> None:
        """Forget the deaths of a key: it has ended."""
        self.changes += self._deaths.pop(key, None) is not None
        self._reasons.pop(key, None)

    def verdict(self, key: str) -> str | None:
        """Return the reason to quarantine a prompt, with that of its last death if known; None while it may run."""
        own = self.number(key) - ALONE_FROM
        if own < self._max_attempts:
            return None
        reason = self._reasons.get(key)
        last = f"; the last time: {reason}" if reason else ""
        return (
            f"its engine or rollouter died {own} times while this prompt alone was generated "
            f"(rollout.max_attempts){last}"
        )

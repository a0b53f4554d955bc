"""The rate at which connections to a server may begin: each takes one from a bucket that fills up again. Pure.

A handshake costs its server a thread's time and a descriptor before anybody has proved who he is. So BURST connections
may begin at once, as when a thousand actors start, and PER_S of them a second in the long run.
Invariant: in any time of t seconds no more than BURST + t PER_S begin, but for those that were already on their way
when the door was shut.
"""

from __future__ import annotations

BURST = 4096
PER_S = 256.0
REOPENS_WITH = 64
"""Connections that may begin when the door opens again: it does not open for each by itself."""


class Door:
    """The door of one server, open from ``now`` (s) on."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST)
        self._looked = now

    def begin(self, now: float) -> float:
        """A connection has begun. Returns the time (s) before which no other may: ``now`` while the door stays open."""
        self._left = min(BURST, self._left + PER_S * (now - self._looked)) - 1
        self._looked = now
        return now if self._left >= 1 else now + (REOPENS_WITH - self._left) / PER_S

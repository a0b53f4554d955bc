"""Absence of a peer: for how long it was not reached, from the first HELLO that is not answered, or the loss of the
connection, until the next WELCOME. Pure.

A connection that is lost again before anything but the WELCOME came over it has reached nobody, as where a path lets
only small packets through. Times are those of the loop's clock (s).
"""

from __future__ import annotations

PROVEN_S = 25.0
"""Time after which a connection that holds is known to lead to the peer, also if nothing was asked: ZeroMQ ends a
half-open one sooner."""


class Absence:
    """The absence of one peer; it was not asked for so far."""

    def __init__(self) -> None:
        self._missed: float | None = None
        """Time since which it was not reached, if it was not when it was last asked for."""
        self._welcomed = 0.0
        """Time at which the newest WELCOME came."""
        self._is_proven = False
        """Whether anything else has come since."""
        self._flaps = False
        """Whether the connection before this one was lost with nothing proven."""

    def miss(self, now: float, *, was_ready: bool) -> None:
        """The peer is not reached from now on, unless it was not before."""
        if was_ready:
            self._flaps = not self._is_proven and now - self._welcomed < PROVEN_S
            # A connection over which nothing came did not end the absence: the time of the first miss stands.
            if not self._flaps:
                self._missed = now
        elif self._missed is None:
            self._missed = now

    def welcome(self, now: float, *, by_another: bool) -> None:
        """A WELCOME has come; ``by_another`` incarnation than the one before."""
        self._welcomed, self._is_proven = now, False
        # Another incarnation may be reached by another path, of which nothing is known so far.
        self._flaps = self._flaps and not by_another

    def forget(self) -> None:
        """Nothing is tried any more to reach the peer."""
        self._missed = None

    def prove(self) -> None:
        """Something else has come over the connection."""
        self._is_proven, self._flaps = True, False

    def unreached_s(self, now: float, *, is_ready: bool) -> float:
        """Seconds for which it was not reached; 0 if it is. Callable from any thread."""
        missed = self._missed
        is_reached = is_ready and (not self._flaps or now - self._welcomed >= PROVEN_S)
        return 0.0 if missed is None or is_reached else now - missed

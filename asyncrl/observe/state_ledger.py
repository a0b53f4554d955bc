"""State-time ledgers: the seconds that a serial resource has spent in each state.

A resource is always in exactly one state of its kind (core/states.py), and names the actor or thing that the state
waits for.

Invariant: the times of all states add up to the age of the ledger, without gaps or overlaps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncrl.core.states import STATES, Kind
from asyncrl.messages.monitor import Resource


class StateLedger:
    """Seconds spent in each state of ``kind``. Safe to read from other threads."""

    def __init__(self, now: Callable[[], float], kind: Kind = "actor", *, born: float | None = None) -> None:
        """``born`` is the start of the resource on the clock ``now``; None if it starts now."""
        self._now = now
        self._states = STATES[kind]
        self.entered: Callable[[str, str], None] = lambda state, awaiting: None
        """Called with each new state, and with the actor or thing that it waits for."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since = now() if born is None else born
        self.state = "starting"
        self.awaiting = ""
        """The actor or thing that the state waits for; empty without one."""

    def enter(self, state: str, awaiting: str = "") -> None:
        """Enter ``state``, which waits for ``awaiting`` if that is not empty; add up the time of the state before."""
        assert state in self._states, f"unknown state {state!r}; known: {', '.join(self._states)}"
        with self._lock:
            now = self._now()
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
            self._since, self.state, self.awaiting = now, state, awaiting
        self.entered(state, awaiting)

    def record(self, name: str) -> Resource:
        """The ledger up to now, as the resource ``name`` of a heartbeat."""
        with self._lock:
            here = self._now() - self._since
            seconds = dict(self._seconds)
            seconds[self.state] = seconds.get(self.state, 0.0) + here
            return Resource(name=name, state=self.state, awaiting=self.awaiting, state_s=here, seconds=seconds)

    def present(self) -> tuple[str, str, float]:
        """The state, the actor or thing that it waits for, and the seconds since it was entered."""
        with self._lock:
            return self.state, self.awaiting, self._now() - self._since

    def age(self) -> float:
        """Seconds since the start of the resource."""
        return sum(self.record("").seconds.values())

"""State-time ledgers: the seconds that a serial resource has spent in each state.

A serial resource does one thing at a time: an engine, a rank of the learner, a worker of the reward pool. It is always
in exactly one state of its kind (STATES), and names the actor or thing that the state waits for.

Invariant: the times of all states add up to the age of the ledger, without gaps or overlaps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from asyncrl.messages.monitor import Resource

Kind = Literal["actor", "engine", "rank", "worker", "player"]

STATES: dict[Kind, dict[str, str]] = {
    "actor": {
        "starting": "it loads its code or sets itself up",
        "ready": "it serves calls",
    },
    "engine": {
        "starting": "the process, its model or its kernels start; it does not serve",
        "waiting": "it serves and has nothing to generate (for leases, or for new weights before the first)",
        "generating": "at least one request runs",
        "pausing": "an update is due, and running requests end or are aborted",
        "paused": "idle for an update, waiting for its turn or for the bytes",
        "loading": "weights are replaced",
        "probing": "new weights are compared with the learner's log-probs before requests are admitted",
        "restarting": "it has died, and another one starts",
        "asleep": "the learner has the GPU",
        "waking": "it gets its memory back",
    },
    "rank": {
        "starting": "imports, rendezvous, the model, the newest checkpoint",
        "waiting": "for groups, for the dataloader, for the last evaluations, or for the engines' GPU",
        "following": "a rank above 0 waits for the next command of rank 0",
        "training": "a step: batch, forward, backward, optimizer",
        "publishing": "weights are gathered and written for the engines",
        "checkpointing": "a checkpoint is staged; it is written during training",
        "exporting": "the model is exported",
        "done": "all steps are trained and all files are written",
    },
    "worker": {
        "starting": "its process starts and imports the function",
        "idle": "it has no task",
        "scoring": "it runs the reward function",
    },
    "player": {
        "starting": "its process starts and imports the user's code",
        "idle": "it has no episode",
        "playing": "at least one episode is open",
    },
}
"""Meaning of each state, by kind of resource."""


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

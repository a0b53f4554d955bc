"""State-time ledgers: in which state a serial resource has spent its life.

A serial resource does one thing at a time: an engine, a rank of the learner, a worker of the reward pool. It is in
exactly one state of the closed set of its kind, and a state says whom or what it waits for, if it does.

Invariant: the times of all states add up to the time since the ledger was made, or since ``born``; there is no gap and
no overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from asyncrl.messages.monitor import ResourceRecord

Kind = Literal["actor", "engine", "rank", "worker", "player"]

STATES: dict[Kind, dict[str, str]] = {
    "actor": {
        "starting": "its code is loaded, or it sets itself up",
        "ready": "it serves whoever calls",
    },
    "engine": {
        "starting": "the process, its model or its kernels come up; nothing is served",
        "waiting": "it serves and has nothing to generate (for leases, or for new weights before the first)",
        "generating": "at least one request is running",
        "pausing": "an update is due, and what runs ends or is aborted",
        "paused": "idle for an update, and waits for its turn or for the bytes",
        "loading": "weights are replaced",
        "probing": "new weights are held against the learner's own log-probs before anything is admitted",
        "restarting": "it has died and another one comes up",
    },
    "rank": {
        "starting": "imports, rendezvous, the model, the newest checkpoint",
        "waiting": "for groups, for the dataloader, or for the last evaluations",
        "following": "a rank above 0 waits for what rank 0 wants done",
        "training": "a step: batch, forward, backward, optimizer",
        "publishing": "weights are gathered and written for the engines",
        "checkpointing": "a checkpoint is staged; it is written while training goes on",
        "exporting": "the model is written for others",
        "done": "everything is trained and written",
    },
    "worker": {
        "starting": "its process comes up and imports the function",
        "idle": "it has no task",
        "scoring": "it runs the reward function",
    },
    "player": {
        "starting": "its process comes up and imports the code of the user",
        "idle": "it has no episode",
        "playing": "at least one episode is open, whatever that waits for",
    },
}
"""Meaning of each state, by kind of resource."""


class StateLedger:
    """Seconds spent in each state of ``kind``. Safe to read from other threads."""

    def __init__(self, now: Callable[[], float], kind: Kind = "actor", *, born: float | None = None) -> None:
        """``born`` is when its life began, where that was before now."""
        self._now = now
        self._states = STATES[kind]
        self.entered: Callable[[str, str], None] = lambda state, awaiting: None
        """Listener that is told of each state that is entered, and whom or what it waits for."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since = now() if born is None else born
        self.state = "starting"
        self.awaiting = ""
        """Whom or what the state waits for; empty when it waits for nothing."""

    def enter(self, state: str, awaiting: str = "") -> None:
        """Be in ``state`` from now on."""
        assert state in self._states, f"{state!r} is none of {', '.join(self._states)}"
        with self._lock:
            now = self._now()
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
            self._since, self.state, self.awaiting = now, state, awaiting
        self.entered(state, awaiting)

    def record(self, name: str) -> ResourceRecord:
        """The ledger as a resource of an actor."""
        with self._lock:
            here = self._now() - self._since
            seconds = dict(self._seconds)
            seconds[self.state] = seconds.get(self.state, 0.0) + here
            return ResourceRecord(name, self.state, self.awaiting, here, seconds)

    def present(self) -> tuple[str, str, float]:
        """The state, whom or what it waits for, and the seconds since it was entered."""
        with self._lock:
            return self.state, self.awaiting, self._now() - self._since

    def age(self) -> float:
        """Seconds since the ledger was made, or born."""
        return sum(self.record("").seconds.values())

"""The clock of an actor, and ActorServices: one object with everything of an actor that its parts use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.observe.logging import Logger
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rpc.awaits import Awaits


class Clock:
    """The clock of one actor. Tests replace it, and the time of the event loop with it."""

    def now(self) -> float:
        """Monotonic seconds; the same on all processes of a host."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds, for what people and other hosts read."""
        return time.time()


class Notify(Protocol):
    """Notifies the user, as Actor.notify does."""

    def __call__(
        self, key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "", of: str = ""
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorServices:
    """Services of the actor ``name``."""

    name: str
    clock: Clock
    log: Logger
    counters: Counters
    histograms: Histograms
    awaits: Awaits
    states: StateLedger
    notify: Notify
    progress: Callable[[], None]

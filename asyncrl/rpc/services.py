"""Services of an actor that the parts it is made of share: passed on as one, so that a part takes those it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.observe.logging import Logger
from asyncrl.observe.metrics import Counters, Histograms
from asyncrl.observe.states import StateLedger
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.clock import Clock
from asyncrl.rpc.notices import Notify


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

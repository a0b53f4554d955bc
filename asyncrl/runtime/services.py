"""Services of an actor that the parts it is made of share: passed on as one, so that a part takes those it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.runtime.awaits import Awaits
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.notices import Notify
from asyncrl.telemetry.logging import Logger
from asyncrl.telemetry.metrics import Figures, Histograms
from asyncrl.telemetry.states import StateLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorServices:
    """Services of the actor ``name``."""

    name: str
    clock: Clock
    log: Logger
    counters: Figures
    histograms: Histograms
    awaits: Awaits
    states: StateLedger
    notify: Notify
    progress: Callable[[], None]

"""The services of an actor, for tests without one."""

from typing import Any

from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.observe.logging import get_logger
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.services import ActorServices, Clock


def services(name: str = "learner/0", clock: Clock | None = None, **parts: Any) -> ActorServices:
    """Services without an effect outside; ``parts`` replace some."""
    clock = clock or Clock()
    alone = {
        "log": get_logger(name),
        "counters": Counters(),
        "histograms": Histograms(),
        "awaits": Awaits(clock.now),
        "states": StateLedger(clock.now, "rank"),
        "notify": lambda *_, **__: None,
        "progress": lambda: None,
    }
    return ActorServices(name=name, clock=clock, **{**alone, **parts})

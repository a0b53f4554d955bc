"""A rollouter with minimal peers in this process: leases, rewards, acknowledgements and versions of its weights.

All are actors, so every message passes the codec and the runtime as it does between processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.controller.actor import Controller
from asyncrl.messages import Done
from asyncrl.messages.groups import Deliver, Group, Lease, NewLeases, RequestLeases, ReturnLeases
from asyncrl.messages.learner import RolloutStats
from asyncrl.messages.reward import Score, Scores
from asyncrl.messages.weights import (
    LoadAnswer,
    Manifest,
    NextUpdate,
    ReportUpdate,
    RequestLoad,
    UpdateAnswer,
    WeightUpdate,
)
from asyncrl.rollouter.actor import Rollouter
from asyncrl.rpc.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.rpc.parking_lot import ParkingLot
from tools.bench.processes import until_ready


@dataclass(slots=True)
class Exchange:
    """The exchange with a rollouter: what goes in and what comes out."""

    manifest: Manifest
    leases: list[Lease] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    serving: int = -1
    """The version that the rollouter serves."""
    changed: ParkingLot = field(default_factory=ParkingLot)
    """Waits for a published or served version."""
    parked: ParkingLot = field(default_factory=ParkingLot)
    delivered: ParkingLot = field(default_factory=ParkingLot)
    leased: int = 0
    unseen: list[Lease] = field(default_factory=list)
    """Leases leased, and not known to have reached the rollouter."""

    async def generate(self, leases: list[Lease], timeout: float) -> list[Group]:
        """Have these groups generated, scored and delivered. Raises TimeoutError."""
        self.groups = []
        self.leases = list(leases)
        self.parked.wake()
        groups = await self.delivered.until(lambda: self.groups if len(self.groups) == len(leases) else None, timeout)
        if groups is None:
            raise TimeoutError(f"{len(self.groups)} of {len(leases)} groups within {timeout:g} s")
        return groups

    async def served(self, timeout: float) -> None:
        """Wait until the newest version is served. Raises TimeoutError."""
        version = self.manifest.version
        if await self.changed.until(lambda: self.serving >= version or None, timeout) is None:
            raise TimeoutError(f"version {version} is not served within {timeout:g} s")


class Counterpart(Actor):
    """One of the peers."""

    role = "counterpart"
    is_restarted = False

    def __init__(self, context: ActorContext, exchange: Exchange) -> None:
        super().__init__(context)
        self.exchange = exchange

    @handler
    async def request_leases(self, request: RequestLeases, caller: Caller) -> NewLeases:
        """Lease as many leases as there is room for; those that the rollouter has not seen are leased again first."""
        return await self.exchange.parked.until(lambda: self._lease(request), caller.park_s) or NewLeases()

    def _lease(self, request: RequestLeases) -> NewLeases | None:
        exchange = self.exchange
        exchange.unseen = [lease for lease in exchange.unseen if lease.number > request.seen]
        again = exchange.unseen[: request.free_groups]
        free = request.free_groups - len(again)
        fresh = [
            msgspec.structs.replace(lease, number=exchange.leased + number)
            for number, lease in enumerate(exchange.leases[:free], 1)
        ]
        del exchange.leases[:free]
        exchange.leased += len(fresh)
        exchange.unseen += fresh
        return NewLeases(leases=again + fresh) if again or fresh else None

    @handler
    def score(self, request: Score, caller: Caller) -> Scores:
        count = len(request.completions)
        return Scores(rewards=[1.0] * count, components=[{}] * count, run_s=0.0)

    @handler
    def deliver(self, request: Deliver, caller: Caller) -> Done:
        self.exchange.groups.append(request.group)
        self.exchange.delivered.wake()
        return Done()

    @handler
    async def next_update(self, request: NextUpdate, caller: Caller) -> UpdateAnswer:
        """The newest version, to a rollouter that does not serve it."""
        return await self.exchange.changed.until(lambda: self._update(request.serving), caller.park_s) or UpdateAnswer()

    def _update(self, serving: int) -> UpdateAnswer | None:
        manifest = self.exchange.manifest
        if serving >= manifest.version:
            return None
        return UpdateAnswer(update=WeightUpdate(version=manifest.version, transport="shm", manifest=manifest))

    @handler
    def request_load(self, request: RequestLoad, caller: Caller) -> LoadAnswer:
        return LoadAnswer(decided=True, may_load=True)

    @handler
    def report_update(self, request: ReportUpdate, caller: Caller) -> Done:
        assert request.committed, request.error
        self.exchange.serving = request.version
        self.exchange.changed.wake()
        return Done()

    @handler
    def return_leases(self, request: ReturnLeases, caller: Caller) -> Done:
        """Leases come back at the end."""
        return Done()

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        """Drop them."""


def make_lease(config: Config, index: int, prompt: str, ids: Sequence[int]) -> Lease:
    rollout = config.rollout
    return Lease(
        uid=f"0-{index}",
        number=0,
        purpose="train",
        epoch=0,
        index=index,
        param_version=0,
        prompt_ids=np.array(ids, np.int32),
        prompt=prompt,
        row={},
        samples=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
    )


@asynccontextmanager
async def serving_rollouter(
    context: Callable[[str, str | None], ActorContext],
    exchange: Exchange,
    timeout: float,
    further: Callable[[str], None] = lambda controller: None,
) -> AsyncIterator[Rollouter]:
    """A rollouter that serves the newest version, its peers and a controller.

    ``context`` makes the context of an actor from its name and the controller's address; ``further`` starts other
    processes once the controller is ready. Raises the error that ended an actor, and TimeoutError.
    """
    controller = Controller(context(CONTROLLER, None))
    lives = [asyncio.create_task(controller.main())]
    actors: list[Actor] = []
    try:
        await until_ready([controller], lives)
        further(controller.address)
        rollouter = Rollouter(context("rollouter/0", controller.address))
        roles = ("dataloader", "reward", "learner", "parameter_server")
        actors = [*(Counterpart(context(f"{role}/0", controller.address), exchange) for role in roles), rollouter]
        lives += [asyncio.create_task(actor.main()) for actor in actors]
        await until_ready(actors, lives)
        await exchange.served(timeout)
        yield rollouter
    finally:
        for actor, life in reversed(list(zip(actors, lives[1:], strict=True))):
            actor.begin_drain()
            await asyncio.wait([life], timeout=timeout)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

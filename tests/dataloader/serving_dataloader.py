"""A real dataloader on the memory network, with rollouters and a learner that answer what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from harness import Net, replace
from inprocess import CREDENTIALS, sim_config

from asyncrl.config import Config
from asyncrl.dataloader.actor import Dataloader
from asyncrl.ledger import Ledger
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.dataloader import (
    Lease,
    Leased,
    Outcome,
    Outcomes,
    OutcomesSeen,
    Restored,
    Resumed,
    Supply,
    WatchSupply,
)
from asyncrl.messages.groups import LedgerState
from asyncrl.messages.learner import Held, Holds
from asyncrl.messages.rollouter import HeldTicket, OpenTickets, TicketsHeld
from asyncrl.runtime.actor import ActorContext, Caller, handler
from asyncrl.runtime.calls.peer import Peer

A, B, LEARNER = "rollouter/0", "rollouter/1", "learner/0"


def small_config(**tables: Any) -> Config:
    """One rollouter, unless the test says otherwise."""
    return sim_config(**tables | {"rollout": {"replicas": 1} | tables.get("rollout", {})})


def restored(**fields: Any) -> Restored:
    """Where a run stands at its very start."""
    start: dict[str, Any] = {"version": 0, "trained_at_version": 0, "groups_left": 24, "outcomes_number": 0}
    return Restored(**{**start, "ledger": LedgerState(), **fields})


def ledger(*trained: int, **fields: Any) -> LedgerState:
    """Indices of epoch 0 that are trained."""
    made = Ledger()
    for index in trained:
        made.record("trained", 0, index)
    return replace(made.state, **fields)


class Rollouter:
    """Answers what it holds."""

    def __init__(self, *held: HeldTicket, seen: int = 0, served_version: int = 0) -> None:
        self.tickets = TicketsHeld(seen=seen, served_version=served_version, tickets=list(held))
        self.learners: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @handler
    async def open_tickets(self, request: OpenTickets, caller: Caller) -> TicketsHeld:
        self.learners.append(request.learner)
        await self.may_answer.wait()
        return self.tickets


class Learner:
    """Answers what it holds."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.asked: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @handler
    async def holds(self, request: Holds, caller: Caller) -> Held:
        await self.may_answer.wait()
        self.asked.append(request.uids)
        return Held(uids=[uid for uid in request.uids if uid in self.held])


class Running:
    """A dataloader and its peers."""

    def __init__(self, net: Net, actor: Dataloader, learner: Learner) -> None:
        self.net, self.actor, self.learner = net, actor, learner
        self._peers: dict[tuple[str, int], Peer] = {}
        self._reports = 0
        self.learner_incarnation = 1
        self.timeout_s = 10.0

    def call(self, name: str, request: Any, incarnation: int = 1, wait_s: float | None = None) -> asyncio.Future[Any]:
        return self._peer(name, incarnation).call(request, timeout=wait_s or self.timeout_s)

    async def hello(self, name: str, incarnation: int) -> None:
        peer = self._peer(name, incarnation)
        peer.connect()
        while not peer.ready:
            await asyncio.sleep(0.001)

    def _peer(self, name: str, incarnation: int) -> Peer:
        peer = self._peers.get((name, incarnation))
        if peer is None:
            peer = self.net.client("dataloader/0", name, incarnation)
            self._peers[name, incarnation] = peer
        return peer

    def restore(self, request: Restored, incarnation: int = 1) -> asyncio.Future[Resumed]:
        """Said by this incarnation of the learner, which is there from here on."""
        self._reports = request.outcomes_number
        if incarnation > self.learner_incarnation:
            self.net.serve(self.learner, LEARNER, incarnation)
            self.learner_incarnation = incarnation
        return self.call(LEARNER, request, incarnation)

    def lease(
        self, name: str = A, free: int = 4, *, incarnation: int = 1, wait_s: float | None = None, **fields: Any
    ) -> asyncio.Future[Leased]:
        request = Lease(**{"seen": 0, "free_groups": free, "served_version": 0, **fields})
        return self.call(name, request, incarnation, wait_s)

    def report(self, *uids: str, kind: Any = "trained", **fields: Any) -> asyncio.Future[OutcomesSeen]:
        self._reports += 1
        outcomes = [Outcome(uid, kind) for uid in uids]
        fields = {"version": 0, "trained_at_version": 0, **fields}
        request = Outcomes(number=self._reports, outcomes=outcomes, **fields)
        return self.call(LEARNER, request, self.learner_incarnation)

    def supply(self, seen: int = -1) -> asyncio.Future[Supply]:
        return self.call(LEARNER, WatchSupply(seen=seen), self.learner_incarnation)


@asynccontextmanager
async def running(
    config: Config,
    run_dir: Path,
    learner: Learner | None = None,
    *,
    rollouters: dict[str, Rollouter] | None = None,
    restore: bool = True,
    incarnation: int = 1,
    net: Net | None = None,
) -> AsyncIterator[Running]:
    """``rollouters`` by name; where there are none given, the config's hold nothing. In ``net``, or one of its own."""
    learner = learner or Learner()
    async with AsyncExitStack() as stack:
        if net is None:
            net = await stack.enter_async_context(Net(memory=True, credentials=lambda _name: CREDENTIALS))
            net.serve(learner, LEARNER)
            if rollouters is None:
                rollouters = {name: Rollouter() for name in config.actors if name.startswith("rollouter/")}
            for name, rollouter in rollouters.items():
                net.serve(rollouter, name)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        context = ActorContext(
            config=config,
            name="dataloader/0",
            incarnation=incarnation,
            run_dir=run_dir,
            transport=net._network.transport(),
            credentials=CREDENTIALS,
            controller=None,
        )
        actor = Dataloader(context)
        actor._endpoint.resolve = net._resolve
        life = tasks.create_task(actor.main())
        while not actor.ready:
            # Where it failed, the task group ends this wait.
            assert not life.done() or life.exception(), "ended before it was ready"
            await asyncio.sleep(0.001)
        net.register(ActorRecord(name="dataloader/0", incarnation=incarnation, address=actor.address))
        it = Running(net, actor, learner)
        if restore:
            steps = config.learner.steps * config.learner.groups_per_step
            await it.restore(restored(groups_left=steps))
        yield it
        actor.begin_drain()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def uids(leased: Leased) -> list[str]:
    return [ticket.uid for ticket in leased.tickets]

"""A real dataloader on the memory network, with rollouters and a learner whose answers a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from harness import Net, actor_context, replace, until
from inprocess import CREDENTIALS
from run_settings import sim_config

from asyncrl.config import Config
from asyncrl.dataloader.actor import Dataloader
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.dataloader import (
    DataloaderStatus,
    LeasesHeld,
    OpenLeases,
    Outcome,
    Outcomes,
    Restored,
    WatchDataloader,
)
from asyncrl.messages.groups import Held, Holds, RequestLeases
from asyncrl.messages.ledger import Ledger, LedgerState
from asyncrl.rpc.actor import Caller, handler

A, B, LEARNER = "rollouter/0", "rollouter/1", "learner/0"


def small_config(**tables: Any) -> Config:
    """Prompts in order, and one rollouter unless the test says otherwise."""
    rollout, data = {"replicas": 1} | tables.get("rollout", {}), {"shuffle": False} | tables.get("data", {})
    return sim_config(**tables | {"rollout": rollout, "data": data})


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

    def __init__(self, attempts: dict[str, int] | None = None, *, seen: int = 0, served_version: int = 0) -> None:
        self.leases = LeasesHeld(seen=seen, served_version=served_version, attempts=attempts or {})
        self.learners: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @handler
    async def open_leases(self, request: OpenLeases, caller: Caller) -> LeasesHeld:
        self.learners.append(request.learner)
        await self.may_answer.wait()
        return self.leases


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
        self.peers: dict[tuple[str, int], Any] = {}
        self.reports = 0
        self.learner_incarnation = 1

    def peer(self, name: str, incarnation: int) -> Any:
        if (name, incarnation) not in self.peers:
            self.peers[name, incarnation] = self.net.client("dataloader/0", name, incarnation)
        return self.peers[name, incarnation]

    def call(self, name: str, request: Any, incarnation: int = 1, wait_s: float = 10.0) -> asyncio.Future[Any]:
        return self.peer(name, incarnation).call(request, timeout=wait_s)

    async def hello(self, name: str, incarnation: int) -> None:
        peer = self.peer(name, incarnation)
        peer.connect()
        await until(lambda: peer.ready)

    def restore(self, incarnation: int = 1, **where: Any) -> asyncio.Future[Any]:
        """Said by this incarnation of the learner, which is there from here on."""
        request = restored(**where)
        self.reports = request.outcomes_number
        if incarnation > self.learner_incarnation:
            self.net.serve(self.learner, LEARNER, incarnation)
            self.learner_incarnation = incarnation
        return self.call(LEARNER, request, incarnation)

    def lease(self, name: str = A, free: int = 4, *, wait_s: float = 10.0, **fields: Any) -> asyncio.Future[Any]:
        fields["holding"] = fields.get("holding", "").split()
        return self.call(
            name, RequestLeases(**{"seen": 0, "free_groups": free, "served_version": 0, **fields}), 1, wait_s
        )

    async def leased(self, *of: Any, **how: Any) -> list[str]:
        """Uids of what is leased; a call that is parked in vain is answered with nothing before half its deadline."""
        return [lease.uid for lease in (await self.lease(*of, **how)).leases]

    async def is_parked(self, call: asyncio.Future[Any]) -> bool:
        """Whether it waits, after every message on its way has come."""
        await asyncio.wait([call], timeout=0.05)
        return not call.done()

    def report(self, *uids: str, kind: Any = "trained", **fields: Any) -> asyncio.Future[Any]:
        self.reports += 1
        outcomes = [Outcome(uid, kind) for uid in uids]
        fields = {"version": 0, "trained_at_version": 0, **fields}
        request = Outcomes(number=self.reports, outcomes=outcomes, **fields)
        return self.call(LEARNER, request, self.learner_incarnation)

    def status(self, seen: int = -1, wait_s: float = 10.0) -> asyncio.Future[DataloaderStatus]:
        return self.call(LEARNER, WatchDataloader(seen=seen), self.learner_incarnation, wait_s)


@asynccontextmanager
async def running(
    run_dir: Path,
    config: Config | None = None,
    *,
    learner: Learner | None = None,
    rollouters: dict[str, Rollouter] | None = None,
    restore: bool = True,
    incarnation: int = 1,
    net: Net | None = None,
) -> AsyncIterator[Running]:
    """``rollouters`` by name; by default those of the configuration hold nothing. In ``net``, or one of its own."""
    config, learner = config or small_config(), learner or Learner()
    async with AsyncExitStack() as stack:
        if net is None:
            net = await stack.enter_async_context(Net(memory=True, credentials=lambda _name: CREDENTIALS))
            net.serve(learner, LEARNER)
            if rollouters is None:
                rollouters = {name: Rollouter() for name in config.actors if name.startswith("rollouter/")}
            for name, rollouter in rollouters.items():
                net.serve(rollouter, name)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        name = "dataloader/0"
        endpoint = net.endpoint(name, incarnation)
        own = {"incarnation": incarnation, "transport": endpoint.transport, "credentials": CREDENTIALS}
        actor = Dataloader(actor_context(config, name, run_dir, **own))
        actor.resolve_peer = endpoint.owner.resolve_peer
        life = tasks.create_task(actor.main())
        # Where it failed, the task group ends this wait.
        await until(lambda: actor.ready or (life.done() and not life.exception()))
        net.register(ActorRecord(name=name, incarnation=incarnation, address=actor.address))
        it = Running(net, actor, learner)
        if restore:
            await it.restore(groups_left=config.learner.steps * config.learner.groups_per_step)
        yield it
        actor.begin_drain()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))

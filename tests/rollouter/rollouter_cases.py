"""A real rollouter between stubs of its peers; what it generates is scripted."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from harness import replace
from inprocess import CREDENTIALS, sim_config
from test_messages import make_group

from asyncrl.errors import RestoreNeeded
from asyncrl.messages import Done
from asyncrl.messages.dataloader import Lease, Leased, ReturnTickets
from asyncrl.messages.groups import Group
from asyncrl.messages.learner import Deliver, Delivered, RolloutStats
from asyncrl.messages.rollouter import OpenTickets, TicketsHeld
from asyncrl.rollouter.actor import Rollouter
from asyncrl.runtime.actor import ActorContext
from asyncrl.runtime.calls.handlers import Caller, handler
from asyncrl.wire.zeromq import ZmqTransport


def group_of(ticket):
    return Group(ticket=ticket, trajectories=make_group(samples=ticket.samples).trajectories)


class Learner:
    """Acknowledges while ``open``; ``refusals`` times it takes no groups yet."""

    def __init__(self, *, open=True, refusals=0):
        self.uids, self.refusals = [], refusals
        self.open = asyncio.Event()
        self.came = asyncio.Event()
        if open:
            self.open.set()

    @handler
    async def deliver(self, request: Deliver, caller: Caller) -> Delivered:
        if self.refusals:
            self.refusals -= 1
            raise RestoreNeeded
        uid = request.group.ticket.uid
        duplicate = uid in self.uids
        self.uids.append(uid)
        self.came.set()
        await self.open.wait()
        return Delivered(duplicate=duplicate)

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        pass


class Dataloader:
    """Grants what is put into ``grants``, numbered from what was seen."""

    def __init__(self):
        self.grants, self.asked, self.returned = [], [], []
        self.partings = []
        """Uids held by one that leaves, each time it said so."""
        self.more = asyncio.Event()
        self.callers = []

    def grant(self, *uids, **changes):
        self.grants += [(uid, changes) for uid in uids]
        self.more.set()

    @handler
    async def lease(self, request: Lease, caller: Caller) -> Leased:
        self.asked.append(request)
        self.callers.append(caller)
        try:
            async with asyncio.timeout(caller.park_s):
                while not self.grants:
                    self.more.clear()
                    await self.more.wait()
        except TimeoutError:
            return Leased()
        given, self.grants = self.grants, []
        return Leased(
            tickets=[
                replace(make_group(uid).ticket, grant=request.seen + n, **changes)
                for n, (uid, changes) in enumerate(given, 1)
            ]
        )

    @handler
    def return_tickets(self, request: ReturnTickets, caller: Caller) -> Done:
        self.returned += request.uids
        if request.leaving:
            self.partings.append(request.holding)
        return Done()


class Life:
    """One incarnation of a rollouter."""

    def __init__(self, net, run_dir, *, incarnation=1, attempt=0, **rollout):
        transport = net._network.transport() if net._network else ZmqTransport(CREDENTIALS, max_message_bytes=1 << 30)
        self.net, self.incarnation = net, incarnation
        self.rollouter = Rollouter(
            ActorContext(
                config=sim_config(rollout=rollout),
                name="rollouter/0",
                incarnation=incarnation,
                run_dir=run_dir,
                transport=transport,
                credentials=CREDENTIALS,
                controller=None,
                attempt=attempt,
            )
        )
        self.rollouter._endpoint.resolve = net._resolve
        self.gates = {}
        """Groups that are not finished before their event."""
        self.rollouter._groups = SimpleNamespace(run=self._generate)
        self.task = asyncio.create_task(self.rollouter.main())

    async def _generate(self, ticket, _account):
        try:
            if ticket.uid in self.gates:
                await self.gates[ticket.uid].wait()
        finally:
            for _ in range(ticket.samples):
                self.rollouter._trajectory_generated(ticket)
        return group_of(ticket)

    async def ready(self):
        while not self.rollouter.ready:
            assert not self.task.done() or self.task.result()
            await asyncio.sleep(0.005)
        return self

    def open_tickets(self, learner, dataloader=1) -> TicketsHeld:
        """The handler's answer, within one callback."""
        caller = Caller("dataloader/0", dataloader, -1, asyncio.get_running_loop().time() + 10)
        return self.rollouter.open_tickets(OpenTickets(learner=learner), caller)

    def within_the_next_reply(self, name, act):
        """Run ``act`` in the very callback that takes in the next reply of a peer, before anybody has it."""
        peer = self.rollouter.peer(name)
        take, results = peer._on_reply, []

        def took(header, frames):
            take(header, frames)
            peer._on_reply = take
            results.append(act())

        peer._on_reply = took
        return results

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.005)

    @property
    def held(self):
        return set(self.rollouter._held)

    async def die(self):
        """As far as a task can: nothing more is said to anybody."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def drain(self):
        self.rollouter.begin_drain()
        await self.task


@asynccontextmanager
async def living(*args, **options):
    life = Life(*args, **options)
    try:
        yield await life.ready()
    finally:
        await life.die()

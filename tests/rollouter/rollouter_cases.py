"""A real rollouter between stubs of its peers, with scripted generation."""

import asyncio
from contextlib import asynccontextmanager

from harness import actor_context, replace, until
from inprocess import CREDENTIALS
from made_group import make_group
from run_settings import sim_config

from asyncrl.core.errors import RestoreNeeded
from asyncrl.messages import Done
from asyncrl.messages.dataloader import LeasesHeld, OpenLeases
from asyncrl.messages.groups import Deliver, Group, NewLeases, RequestLeases, ReturnLeases
from asyncrl.messages.learner import RolloutStats
from asyncrl.rollouter import actor
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.wire.envelope import Kind, decode_header


def group_of(lease):
    return Group(lease=lease, trajectories=make_group(samples=lease.samples).trajectories)


class Learner:
    """Acknowledges while ``open``; ``refusals`` times it does not accept groups yet."""

    def __init__(self, *, open=True, refusals=0):
        self.uids, self.refusals = [], refusals
        self.failures = []
        """The failure of each group, or None."""
        self.open = asyncio.Event()
        self.came = asyncio.Event()
        self.answered = False
        self.stats = []
        if open:
            self.open.set()

    @handler
    async def deliver(self, request: Deliver, caller: Caller) -> Done:
        if self.refusals:
            self.refusals -= 1
            raise RestoreNeeded
        uid = request.group.lease.uid
        self.uids.append(uid)
        self.failures.append(request.group.failure)
        self.came.set()
        await self.open.wait()
        self.answered = True
        return Done()

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        self.stats.append(request)


class Dataloader:
    """Leases the entries of ``leases``, under numbers above ``seen``, and again until they are seen."""

    def __init__(self):
        self.leases, self.asked, self.returned = [], [], []
        self.unseen = []
        self.partings = []
        """Uids held by a leaving rollouter, for each report."""
        self.more = asyncio.Event()
        self.callers = []

    def lease(self, *uids, **changes):
        self.leases += [(uid, changes) for uid in uids]
        self.more.set()

    @handler
    async def request_leases(self, request: RequestLeases, caller: Caller) -> NewLeases:
        self.asked.append(request)
        self.callers.append(caller)
        self.unseen = [lease for lease in self.unseen if lease.number > request.seen]
        try:
            async with asyncio.timeout(caller.park_s):
                while not (self.leases or self.unseen):
                    self.more.clear()
                    await self.more.wait()
        except TimeoutError:
            return NewLeases()
        given, self.leases = self.leases, []
        last = max([request.seen, *(lease.number for lease in self.unseen)])
        self.unseen += [
            replace(make_group(uid).lease, number=last + n, **changes) for n, (uid, changes) in enumerate(given, 1)
        ]
        return NewLeases(leases=list(self.unseen))

    @handler
    def return_leases(self, request: ReturnLeases, caller: Caller) -> Done:
        self.returned += request.uids
        if request.leaving:
            self.partings.append(request.holding)
        return Done()


class Ears:
    """A transport that drops messages of some actors, and runs code in the callback that receives a reply."""

    def __init__(self, transport):
        self._transport = transport
        self.bind, self.admit, self.close = transport.bind, transport.admit, transport.close
        self.deaf_to = set()
        self.after_reply = {}
        """For each actor, a function to call when its next reply has been received."""

    def connect(self, address, routing_id, receive, lost, peer):
        def hear(frames):
            if peer in self.deaf_to:
                return
            receive(frames)
            if peer in self.after_reply and decode_header(frames[0]).kind == Kind.REPLY:
                self.after_reply.pop(peer)()

        return self._transport.connect(address, routing_id, hear, lost, peer)


class ScriptedGroups:
    """In place of ``GroupRunner.run``: groups finish at once, or at the event that ``gates`` has for them."""

    def __init__(self):
        self.gates, self.leases = {}, None

    async def run(self, lease, _events):
        try:
            if lease.uid in self.gates:
                await self.gates[lease.uid].wait()
        finally:
            for _ in range(lease.samples):
                self.leases.generated(lease)
        return group_of(lease)


class ScriptedRollouter(actor.Rollouter):
    """Its groups come from a script."""

    async def setup(self):
        await super().setup()
        self._groups.run, self.script.leases = self.script.run, self._leases


class Life:
    """One incarnation of a rollouter."""

    def __init__(self, net, run_dir, *, incarnation=1, attempt=0, **rollout):
        self.net, self.incarnation = net, incarnation
        outward = net.endpoint("rollouter/0", incarnation)
        self.ears = Ears(outward.transport)
        self.groups = ScriptedGroups()
        own = {"incarnation": incarnation, "attempt": attempt, "transport": self.ears, "credentials": CREDENTIALS}
        self.rollouter = ScriptedRollouter(actor_context(sim_config(rollout=rollout), "rollouter/0", run_dir, **own))
        self.rollouter.script = self.groups
        self.rollouter.resolve_peer = outward.owner.resolve_peer
        self.gates = self.groups.gates
        self.task = asyncio.create_task(self.rollouter.main())

    async def ready(self):
        await self.until(lambda: self.rollouter.ready)
        return self

    def open_leases(self, learner, dataloader=1) -> LeasesHeld:
        """The handler's answer, within one callback."""
        caller = Caller("dataloader/0", dataloader, -1, asyncio.get_running_loop().time() + 10)
        return self.rollouter.open_leases(OpenLeases(learner=learner), caller)

    def within_the_next_reply(self, name, act):
        """Run ``act`` in the same callback that receives the next reply of a peer, before any other code sees it."""
        results = []
        self.ears.after_reply[name] = lambda: results.append(act())
        return results

    async def until(self, condition):
        """Wait for a condition of a live rollouter."""

        def met():
            found = condition()
            assert found or not self.task.done(), self.task
            return found

        await until(met)

    @property
    def held(self):
        """The number of each lease that it holds, by uid."""
        return {uid: lease.number for uid, lease in self.rollouter._leases.held.items()}

    async def die(self):
        """Die as a process does: no more messages are sent."""
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

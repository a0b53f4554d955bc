"""The base of every actor.

An actor binds one server, knows its peers by name, and passes through setup → run → close. Its background tasks belong
to one TaskGroup: when one fails, the actor fails and ends. It reports the reason to the controller only if the failure
may end the run. It ends in good order when the controller drains its role. Everything here runs on one event loop; work
that blocks goes to a thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, WireError
from asyncrl.core.states import Kind
from asyncrl.messages.actors import ActorRecord, Dead, Notice, ReportFailure, Resolve, RunState
from asyncrl.messages.hosts import Members
from asyncrl.messages.monitor import MOST_UNREACHED, Resource, UnreachedRecord, Wait
from asyncrl.observe.logging import get_logger, lost_lines
from asyncrl.observe.machine import Vitals, VitalSigns
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.observe.trace import STATES, Trace, spans_kept
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.calls.endpoint import Endpoint, EndpointOwner
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.calls.server import CallServer
from asyncrl.rpc.controller_session import REPORT_S, ControllerSession, sendable
from asyncrl.rpc.heartbeat import EventQueue, HeartbeatDelta, read_metrics
from asyncrl.rpc.lifecycle.roster import CONTROLLER, Roster
from asyncrl.rpc.lifecycle.supervision import UNHEALABLE_EXITS
from asyncrl.rpc.services import ActorServices, Clock
from asyncrl.rpc.wire.codec import encodable
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.transport import Transport

__all__ = ["CONTROLLER", "Actor", "ActorContext", "Caller", "handler"]


@dataclass(frozen=True, kw_only=True)
class ActorContext:
    """Constructor argument of an actor: its identity, configuration, keys and transport."""

    config: Config
    name: str
    incarnation: int
    run_dir: Path
    transport: Transport
    credentials: Credentials
    controller: str | None
    """Address of the controller; None for the controller itself."""
    attempt: int = 0
    """Number of its key pair: its restarts so far, at most supervision.max_restarts; 0 for the controller."""
    is_optional: bool = False
    """Whether the run continues without any actor of its role: no failure of it ends the run."""
    clock: Clock = field(default_factory=Clock)
    born: float | None = None
    """Time at which its process was spawned, on ``clock``; None for now."""
    bind_host: str = ""
    """Address at which other hosts reach this one; empty for network.host, as in a run on one host."""
    address: str = ""
    """Address of the server of its predecessor, which the controller binds again; empty if unknown."""

    @property
    def host(self) -> str:
        """The address that this actor binds."""
        return self.bind_host or self.config.network.host

    @property
    def index(self) -> int:
        """The number in ROLE/INDEX."""
        return int(self.name.partition("/")[2])


class Actor(EndpointOwner):
    """The base of every actor; see the module."""

    role: ClassVar[str]
    is_restarted: ClassVar[bool] = True
    """Whether a node agent starts this actor again when it ends; False for the node agent itself."""
    kind: ClassVar[Kind] = "actor"
    """The key of STATES in core/states.py that lists the states of this actor."""

    def __init__(self, context: ActorContext) -> None:
        self.context = context
        self.config = context.config
        self.name = context.name
        self.clock = context.clock
        self.log = get_logger(context.name)
        self.trace = Trace(
            self.clock.now,
            self.clock.wall,
            window_s=self.config.trace.window_s,
            kept=spans_kept(len(self.config.actors)),
        )
        """Timeline of this actor's spans."""
        self.states = StateLedger(self.clock.now, self.kind, born=context.born)
        self._follow_states(self.states)
        self.awaits = Awaits(self.clock.now)
        self.address = ""
        """Address at which its server is bound, once it is."""
        self.facts: dict[str, Any] = {}
        """Facts that the controller's registry gets with the address, by name; set in setup."""
        self.ready = False
        self.dead: dict[str, int] = {}
        """By name of another actor: this incarnation of it and all older ones are known to be dead."""
        self.tasks: asyncio.TaskGroup
        self.run_state = RunState(number=-1, phase="starting")
        """State of the run, as last received from the controller."""
        self.roster = Roster(self.config.actors, context.credentials, context.transport)
        self._drained = asyncio.Event()
        """Set when this actor is to end."""
        self._peers: dict[str, Peer] = {}
        self._server: CallServer | None = None
        self._progress = 0
        """Number of calls of ``progress``."""
        self._controller_session = ControllerSession(self)
        self._endpoint = Endpoint(
            name=context.name,
            incarnation=context.incarnation,
            credentials=context.credentials,
            transport=context.transport,
            call_timeout_s=self.config.network.call_timeout_s,
            max_message_bytes=self.config.network.max_message_bytes,
            owner=self,
        )
        self.counters = self._endpoint.counters
        """Counters by their names, and gauges that are set rather than read (``metrics``); see docs/metrics.md."""
        self.histograms = self._endpoint.histograms
        self.events = EventQueue(self.clock.wall)
        """Warnings and errors for the next heartbeats."""
        self.heartbeat_delta = HeartbeatDelta()
        """Reduces each heartbeat to the values that have changed."""
        self._vitals: VitalSigns | None = None
        self.services = ActorServices(
            name=self.name,
            clock=self.clock,
            log=self.log,
            counters=self.counters,
            histograms=self.histograms,
            awaits=self.awaits,
            states=self.states,
            notify=self.notify,
            progress=self.progress,
        )
        """Services that this actor passes to its parts."""

    # --- methods to override ---

    async def setup(self) -> None:
        """Become able to serve. The actor is not ready, and no handler of it is called, before this returns."""

    async def run(self) -> None:
        """Work until the actor is drained."""
        await self.drained()

    async def close(self) -> None:
        """Release all resources; called however the actor ends."""

    def peer_died(self, name: str, incarnation: int) -> None:
        """Handle the death of another actor: this incarnation of it and all older ones are dead.

        Called at most once for each incarnation. The sign is the HELLO of a newer incarnation, or the controller's
        report that the process has ended, its host is lost, or it has left the run.
        """

    def preempted(self) -> None:
        """Handle the preemption of the run: begin nothing new, and bring results to the learner's checkpoint.

        Called once, from the event loop, after ``setup``.
        """

    def asked_to_leave(self, within_s: float) -> None:
        """Leave the run, which continues. The actor may finish its work within ``within_s`` seconds.

        Called once, from the event loop, after ``setup``. An actor that must leave during ``setup`` just ends.
        """
        self.begin_drain()

    # --- methods to use ---

    @property
    def param_version(self) -> int:
        """The newest weights this actor knows of; goes into every header."""
        return self._endpoint.param_version

    @param_version.setter
    def param_version(self, version: int) -> None:
        self._endpoint.param_version = version

    def peer(self, name: str) -> Peer:
        """Returns the connection to the actor ``name``, and makes it at the first use."""
        peer = self._peers.get(name)
        if peer is None:
            record = None
            if name == CONTROLLER and self.context.controller is not None:
                record = ActorRecord(name=name, incarnation=0, address=self.context.controller)
            peer = self._peers[name] = Peer(self._endpoint, name, record)
            # The death was known before the connection existed: ignore messages of that incarnation here too.
            if name in self.dead and not peer.is_fixed:
                peer.adopt(self.dead[name] + 1)
        return peer

    def progress(self) -> None:
        """Count an event that shows progress. While they come, no heartbeat is left out (heartbeat.py)."""
        self._progress += 1

    def notify(
        self, key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "", of: str = ""
    ) -> None:
        """Show ``text`` to the user, at once and in the summary at the end of the run.

        ``text`` says what happened, where, and what to do. A later notice with the same ``key`` replaces this one.
        ``count`` is how often it happened, and ``of`` the total that the count belongs to, as in "279 calls".
        ``meanwhile`` are further sentences that are shown during the run only. ``waits_for`` is shown in the run's
        progress line until the next notice with this key or the end of this incarnation. Call it in the thread of the
        event loop.
        """
        notice = sendable(key, text, count=count, meanwhile=meanwhile, waits_for=waits_for, of=of)
        if self._controller_session.notices.add(notice):
            self.log.warning(text, notice=key)
        self.pass_on(notice)

    def pass_on(self, notice: Notice) -> None:
        """Wake the task that sends queued notices to the controller. A class that overrides it may use ``notice``."""
        self._controller_session.noticed.set()

    async def publish_facts(self) -> None:
        """Register ``facts`` before this actor can be called. Called by ``setup``, if others need the facts early."""
        await self._controller_session.register(address="")

    def begin_drain(self) -> None:
        """End in good order."""
        self._drained.set()

    async def drained(self) -> None:
        """Wait until this actor is to end."""
        await self._drained.wait()

    @property
    def draining(self) -> bool:
        """Whether this actor is to end."""
        return self._drained.is_set()

    def handling_parts(self) -> Iterable[object]:
        """The objects whose ``@handler`` methods this actor serves. A class that overrides it adds its parts."""
        return (self,)

    def pulse(self) -> tuple[object, ...]:
        """Values that change whenever this actor does something; called from any thread.

        While they stay the same, some heartbeats are left out (heartbeat.py). A class that overrides this adds to it.
        """
        states = self.states
        return self._progress, self.ready, states.state, states.awaiting, self.events.number, self.run_state.number

    def metrics(self) -> dict[str, float]:
        """Metrics that can be read at any time; called from any thread. A class that overrides it adds to it."""
        return {
            "calls/in_flight": sum(peer.in_flight for peer in list(self._peers.values())),
            "calls/being_served": self._server.being_served if self._server is not None else 0,
            "events/dropped": self.events.dropped,
            "logs/lost": lost_lines(),
        }

    def measure(self) -> None:
        """Measure its process from now on: event loop, processors, memory, GPUs. In the thread of the event loop."""
        loop, interval_s = asyncio.get_running_loop(), self.config.supervision.heartbeat_s
        # The children of an agent are actors, which measure themselves.
        self._vitals = VitalSigns(loop, self.histograms, interval_s, family=self.is_restarted)

    def stop_measuring(self) -> None:
        """Stop the measurements; called before the event loop ends."""
        if self._vitals is not None:
            self._vitals.stop()

    def resources(self) -> list[Resource]:
        """The serial resources of this actor, such as its engine (observe/state_ledger.py); called from any thread."""
        return []

    def vitals(self) -> Vitals:
        """Vital signs of the process since the last call."""
        return self._vitals.take() if self._vitals is not None else Vitals()

    def waits(self) -> list[Wait]:
        """The open waits, then the calls in flight that no open wait covers; called from any thread.

        The calls of one type to one peer are one wait (``Peer.oldest_calls``). A class that overrides this adds to it.
        """
        waits = self.awaits.records()
        covered = {(wait.whom, wait.what) for wait in waits}
        for peer in list(self._peers.values()):
            waits += [call for call in peer.oldest_calls() if (call.whom, call.what) not in covered]
        return waits

    def unreached(self) -> list[UnreachedRecord]:
        """The peers, other than the controller, that this actor cannot reach, and for how long.

        At most MOST_UNREACHED, those unreached for longest first.
        """
        records = [
            UnreachedRecord(peer.name, s) for peer in list(self._peers.values()) if (s := peer.unreached_s) > 0.0
        ]
        others = [record for record in records if record.whom != CONTROLLER]
        return sorted(others, key=lambda record: -record.seconds)[:MOST_UNREACHED]

    # --- its life ---

    async def main(self) -> None:
        """Run the actor to its end. Raises the first error of its tasks; returns if there is none.

        In both cases it sends its last notices and its trace; between them it reports an error (``_report``). Then it
        closes its peers, itself (``close``, for ``drain_s`` at most), the controller's connection and its server.
        """
        try:
            async with asyncio.TaskGroup() as self.tasks:
                try:
                    self._server = CallServer(self._endpoint, self.handling_parts())
                    self.address = self._bind(self._server)
                    await self._live()
                finally:
                    # Before the group cancels its tasks, because a cancelled group takes no task for a later call.
                    self._endpoint.ending = True
                raise _Ended
        except* _Ended:
            await self._controller_session.send_last_notices()
            await self._controller_session.send_trace(0)
        except* Exception as group:
            error = _first_error(group)
            self.log.error("actor failed", reason=str(error), exc_info=error)
            await self._controller_session.send_last_notices()
            await self._report(error)
            await self._controller_session.send_trace(0)
            raise error from None
        finally:
            for peer in self._peers.values():
                if peer.name != CONTROLLER:
                    peer.close()
            try:
                async with asyncio.timeout(self.config.supervision.drain_s):
                    await self.close()
            except TimeoutError:
                self.log.error("not closed in time", state=self.states.state)
            finally:
                self.peer(CONTROLLER).close()
                if self._server is not None:
                    self._server.close()
                self.context.transport.close()
                self.log.info("ended", counters=read_metrics(self))

    async def _live(self) -> None:
        """Register, set up, become ready, register the address, and run; ends early if drained during the setup."""
        supervised = self.context.controller is not None
        if supervised:
            await self._controller_session.register(address="")
            # Before other actors can find this one: it would reject an actor that has joined, which never tries again.
            await self._controller_session.learn_members(self.config.supervision.start_timeout_s)
            # Before the setup, which is given up when the actor is to end.
            self.tasks.create_task(self._controller_session.run(), name="watch_run")
            self.tasks.create_task(self._controller_session.send_notices(), name="notices")
        await self._until_drained(self.setup())
        if self.draining:
            return
        # Before the address is registered: calls come as soon as others can resolve it.
        self.ready = True
        # An actor of another kind enters its states itself.
        if self.kind == "actor":
            self.states.enter("ready")
        # The run may have been preempted during setup.
        self._controller_session.preempt()
        if supervised:
            await self._controller_session.register(address=self.address)
        await self.run()

    async def _until_drained(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, but give it up when this actor is drained meanwhile."""
        task = asyncio.create_task(work)
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            # Where both are done, an error of the work still counts.
            if task.done():
                await task
        finally:
            for item in (task, drained):
                item.cancel()
            await asyncio.gather(task, drained, return_exceptions=True)

    def _bind(self, server: CallServer) -> str:
        try:
            return server.bind(self._bind_address())
        except OSError as error:
            where = "where network.host, network.interface and network.ports want it"
            raise OSError(error.errno, f"{error.strerror}, {where}") from None

    def _bind_address(self) -> str:
        """The address to bind, with the ports from highest to lowest, so that the highest free one is taken.

        The lowest port belongs to the controller, whose successor binds it again.
        """
        low, dash, high = self.config.network.ports.partition("-")
        return f"tcp://{self.context.host}:{high}{dash}{low}"

    def record(self, address: str = "") -> ActorRecord:
        """This actor's record for the registry. ``address`` stays empty until the actor can be called."""
        return ActorRecord(
            name=self.name,
            incarnation=self.context.incarnation,
            address=address,
            host=socket.gethostname(),
            pid=os.getpid(),
            facts=self.facts,
            attempt=self.context.attempt,
        )

    def take_in(self, members: Members) -> None:
        """Admit the actors that have joined, and drop those that have left."""
        self.fence(self.roster.take_in(members))

    def _follow_states(self, states: StateLedger) -> None:
        """Show the states in the timeline."""
        track = self.trace.track("state", STATES)
        track.enter(states.state)
        states.entered = lambda state, awaiting: track.enter(f"{state}: {awaiting}" if awaiting else state)

    def fence(self, dead: list[Dead]) -> None:
        """Ignore these incarnations from now on."""
        for actor in dead:
            # The list may name this actor, as after the loss of its host, or its predecessor: neither is a peer of it.
            if actor.name != self.name:
                self.note_death(actor.name, actor.incarnation)

    def note_death(self, name: str, incarnation: int) -> None:
        """Record a death: drop the connections with this incarnation and older ones, and call ``peer_died``.

        Does nothing if this incarnation or a newer one is known to be dead.
        """
        if incarnation > self.dead.get(name, 0):
            self.dead[name] = incarnation
            assert self._server is not None
            self._server.fence(name, incarnation)
            if (peer := self._peers.get(name)) is not None and not peer.is_fixed:
                peer.adopt(incarnation + 1)
            self.peer_died(name, incarnation)

    async def resolve_peer(self, name: str, above: int) -> ActorRecord | None:
        reply = await self.peer(CONTROLLER).call(Resolve(name=name, above=above))
        record: ActorRecord | None = reply.record
        return record

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.tasks.create_task(work)

    def handler_failed(self, type: str, error: BaseException) -> None:
        self._endpoint.counters.add("errors/handler")
        self.log.error("handler failed", type=type, exc_info=error)

    async def _report(self, error: BaseException) -> None:
        """Report ``error`` to the controller as the reason to end the run.

        Does nothing if a node agent may restart this actor, or if the run continues without it.
        """
        is_final = isinstance(error, AsyncRLError) and (not error.restartable or error.exit_code in UNHEALABLE_EXITS)
        if self.context.controller is None or self.context.is_optional or (self.is_restarted and not is_final):
            # The node agent decides about a restart; the run continues meanwhile.
            return
        exit_code = error.exit_code if isinstance(error, AsyncRLError) else 1
        reason = str(error) if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
        # The reason is shown as one line.
        reason = encodable("; ".join(line.strip() for line in reason.splitlines()))
        try:
            # The task group is over by now, but a connection to a fixed address needs no task.
            await self.peer(CONTROLLER).call(ReportFailure(reason=reason, exit_code=exit_code), timeout=REPORT_S)
        except WireError as lost:
            self.log.warning("failure not reported", error=str(lost))


class _Ended(Exception):
    """Raised in the task group of ``main`` at the actor's end, so that the group cancels the tasks that still run."""


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

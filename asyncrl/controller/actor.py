"""The controller: registry, run state, fan-out of metrics, watchdog. No bulk data passes through it.

Its own port is bound before anything else of the run is started; it leaves its address in the run's private
folder, where the node agent finds it. Everything that is decided is decided in ``run_state`` and
``registry``; this shell turns messages and time into their events, and wakes parked calls when something
changed. It ends by itself once the state of the run is final. Words of an actor of an older incarnation are
refused.

It keeps nothing but its address, the list of hosts, the newest incarnations, who has joined and left, and the recorded
snapshots: a successor binds the same address, is told everything else anew by the actors and agents that come back to
it, knows by the lists who may not, numbers its states above all that were seen before, and shows the events and lines
that were recorded. It takes the largest incarnation that it hears of each that is not kept, as in a damaged file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.controller.health.failure_detector import FailureDetector
from asyncrl.controller.joining.host_changes import HostChanges
from asyncrl.controller.joining.hosts import Hosts
from asyncrl.controller.observation.observation import Observation
from asyncrl.controller.observation.open_waits import OpenWaits
from asyncrl.controller.observation.recent_lines import RecentLines, is_proper
from asyncrl.controller.observation.sinks_feed import SinksFeed
from asyncrl.controller.observation.snapshot_builder import LONGEST_TEXT
from asyncrl.controller.observation.traces import Traces, remove_unfinished
from asyncrl.controller.state.reserve import SINKS
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.disk import in_words
from asyncrl.errors import InvalidRequest, Refused
from asyncrl.files import replace_file
from asyncrl.messages import Done
from asyncrl.messages.actors import (
    ActorEnded,
    ActorRecord,
    ActorStarted,
    Aside,
    BringBack,
    CheckpointWritten,
    EndNoted,
    Notice,
    Register,
    ReportFailure,
    Resolve,
    Resolved,
    RunFinished,
    RunState,
    StopRun,
    WatchRun,
)
from asyncrl.messages.hosts import HostLeft, Join, Joined, Leave, LeaveBegun, Members, WatchMembers
from asyncrl.messages.monitor import (
    Heartbeat,
    Metrics,
    MetricsLine,
    RequestTrace,
    SnapshotTaken,
    TracePart,
    TraceWritten,
    WatchMetrics,
    WatchSnapshot,
)
from asyncrl.roles import gang_of, role_of
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.runtime.address_file import ADDRESS_FILE, AddressFile, read_address_file
from asyncrl.runtime.lifecycle.incarnations import numbers_begin_above
from asyncrl.runtime.lifecycle.registry import Registry
from asyncrl.runtime.notices import sendable
from asyncrl.runtime.parking import ParkingLot

FEW_ACTORS = 64
"""Most actors in the registry with which each of its changes is followed at once."""
GATHER_S = 0.05
"""Time for which changes are gathered with more: to follow them looks at all actors, and a thousand that register one
after the other would have a thousand looked at a thousand times."""
FAREWELL_S = 0.3
"""Time that the last state has to leave the sockets."""


class Controller(Actor):
    """The controller of one run."""

    role = "controller"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._registry = Registry(gang_of)
        self._run = RunStateMachine(
            expected=frozenset(self.config.actors) - {CONTROLLER},
            now=self.clock.now(),
            start_timeout_s=self.config.supervision.start_timeout_s,
            drain_s=self.config.supervision.drain_s,
            grace_s=self.config.preempt.grace_s,
            host_grace_s=self.config.supervision.host_grace_s,
            min_replicas=self.config.rollout.min_replicas,
            rest_s=self.config.supervision.restart_window_s,
            number=numbers_begin_above(context.incarnation),
        )
        supervision = self.config.supervision
        self._hosts = Hosts(
            supervision.host_lost_s,
            supervision.heartbeat_s,
            CONTROLLER,
            # The guard kills a frozen agent before. Then the whole host is silent.
            frozen_s=supervision.agent_silence_s + supervision.host_lost_s,
        )
        self._to_keep = asyncio.Event()
        """Set when the address file lacks what a successor is to know."""
        self._numbered = 0
        """Changes of the registry's numbers that a successor would know."""
        self._lines = RecentLines()
        self._waits = OpenWaits()
        self._sinks = SinksFeed(
            self.counters, numbers_begin_above(context.incarnation), wanted=self.config.sinks.are_wanted
        )
        self._restarts = 0
        """Times that a controller of this attempt of the run was started again."""
        self._watching = Observation(
            self,
            self._registry,
            self._run,
            # Through functions: the failure detector and the members are made below.
            stalled=lambda: self._failures.stalled,
            sink=self._sinks.snapshot,
            is_gone=lambda name: self._members.is_gone(name),
        )
        self._traces = Traces(
            context.run_dir,
            self.config.run.name,
            self.config.actors,
            name=self.name,
            trace=self.trace,
            ready=self._registry.ready,
            ask=self._ask_for_trace,
            number=numbers_begin_above(context.incarnation),
            log=self.log,
            notify=self.notify,
        )
        self._aside: dict[str, Aside] = {}
        """Replicas that are set aside, as the user knows."""
        self._times_aside: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._gathered = asyncio.Event()
        """The registry has changed, and nobody has followed it so far."""
        self._watchers = ParkingLot()
        self._followers = ParkingLot()
        """Watchers who also follow metrics, notices, and who is awaited while the run starts."""
        self._said: tuple[int, RunState] | None = None
        """The state that watchers are told, and its number: made once for all of them."""
        self._registered = ParkingLot()
        self._members = HostChanges(self, self._registry, self._run, self._hosts, tell=self._members_changed)
        self._failures = FailureDetector(
            self,
            self._registry,
            self._run,
            self._hosts,
            self._members,
            self._watching,
            tell=self._tell,
            changed=self._registry_changed,
        )
        self._earlier = self._predecessor()
        if self._earlier is not None:
            self._registry.recall(self._earlier.newest, self._earlier.generations)
            self._run.tell_generations(self._registry.generations)
        # Before the first bind: a host that has joined knows the address, and knocks as soon as it is there.
        self._members.recall()
        self.roster.take_in(self._members.members)

    async def setup(self) -> None:
        """Leave the address where the agent looks for it."""
        self._run.checkpoint = await asyncio.to_thread(self._newest_checkpoint)
        await asyncio.to_thread(remove_unfinished, self.context.run_dir)
        if (earlier := self._earlier) is not None:
            self._hosts.recall(earlier.hosts, self.clock.now())
            self._watching.began = min(self._watching.began, earlier.began)
            self._restarts = earlier.restarts + 1
            self._watching.succeed(self._restarts, await asyncio.to_thread(self._watching.recall))
        await self._write_address_file()

    async def _write_address_file(self) -> None:
        said = AddressFile(
            address=self.address,
            incarnation=self.context.incarnation,
            hosts=self._hosts.describe(),
            began=self._watching.began,
            restarts=self._restarts,
            newest=self._registry.newest,
            generations=self._registry.generations,
        )
        text = msgspec.json.encode(said).decode()
        await asyncio.to_thread(replace_file, self._address_file, text, mode=0o600)

    async def _keep(self) -> None:
        """Keep the file for a successor, which is not told of a lost host, nor of those nobody tells of any more."""
        while True:
            await self._to_keep.wait()
            self._to_keep.clear()
            try:
                await self._write_address_file()
            except OSError as error:
                lacks = "the list of hosts and the newest incarnations"
                self.notify("hosts", f"a later controller lacks {lacks}: {in_words(error, self._address_file)}")

    @property
    def _address_file(self) -> Path:
        return self.context.run_dir / "private" / ADDRESS_FILE

    def _bind_address(self) -> str:
        """Address of an earlier incarnation, or the configured one."""
        if self._earlier is not None and self._earlier.address:
            return self._earlier.address
        network = self.config.network
        return f"tcp://{self.context.host}:{network.controller_port or network.ports}"

    def _predecessor(self) -> AddressFile | None:
        """File that an earlier controller of this attempt of the run has left; None if this is the first one."""
        try:
            found = read_address_file(self._address_file)
        except ValueError as error:
            lost = "its list of hosts and the incarnations included"
            self.log.warning("what the last controller kept is lost, %s", lost, error=str(error))
            found = AddressFile(address="")
        if self.context.address:
            # Everybody looks for it there.
            return msgspec.structs.replace(found or AddressFile(address=""), address=self.context.address)
        return found

    def _newest_checkpoint(self) -> int:
        try:
            found = CheckpointFolder(checkpoint_dir(self.config, self.context.run_dir)).newest()
        except OSError as error:
            self.log.warning("checkpoints cannot be read here", error=str(error))
            return -1
        return found.version if found is not None else -1

    async def close(self) -> None:
        """Count what the sinks have not taken."""
        self._sinks.close()

    async def run(self) -> None:
        """Let time act on the run until its state is final."""
        self.tasks.create_task(self._failures.run())
        self.tasks.create_task(self._keep())
        self.tasks.create_task(self._follow_registry())
        self.tasks.create_task(self._watching.run())
        self.tasks.create_task(self._members.run())
        while not self._run.final:
            deadline = self._run.next_deadline()
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self.clock.now())):
                    await self._changed.wait()
            except TimeoutError:
                self.log.debug("a deadline of the run has come")
            self._changed.clear()
            if self._run.tick(self.clock.now()):
                self._tell()
        await self._watching.conclude()
        await self._traces.finish()
        await asyncio.sleep(FAREWELL_S)

    # --- registry ---

    @handler
    def register(self, request: Register, caller: Caller) -> Done:
        """Take in an actor's record. Raises Refused for one of an older incarnation."""
        if (request.record.name, request.record.incarnation) != (caller.name, caller.incarnation):
            raise Refused(self.name, "name", ours=caller.name, theirs=request.record.name)
        if self._members.is_gone(request.record.name):
            raise Refused(self.name, "name", ours="one of the run's", theirs=f"{request.record.name}, which has left")
        try:
            self._registry.register(request.record, self.clock.now())
            self._run.started(request.record.name)
            if self._hosts.register(request.record, self.clock.now()):
                self._to_keep.set()
            self.log.info("registered", actor=request.record.name, address=request.record.address)
            if request.record.address and self._run.phase != "starting":
                self._watching.happened("info", request.record.name, "is ready again")
            if request.record.address and request.record.attempt:
                self._lines.add_ready(request.record.name)
        finally:
            # Also where it is refused: one of a generation that is over is entered as condemned.
            self._registry_changed()
        return Done()

    @handler
    def heartbeat_of(self, request: Heartbeat, caller: Caller) -> None:
        """Note a heartbeat. Its absence is a stall: its process is killed before anybody counts it as dead."""
        if not self._registry.heartbeat(caller.name, caller.incarnation, request, self.clock.now()):
            # Before it has registered it is nobody yet.
            if caller.name in self._registry.entries:
                self.counters.add("heartbeats/ignored")
            return
        entry = self._registry.entries[caller.name]
        entry.version = caller.param_version
        self.counters["heartbeats/left_out"] = self._registry.left_out
        # As the registry has taken them in: cut, and no more than its limit.
        self._watching.add_events(caller.name, entry.heartbeat.events if entry.heartbeat is not None else ())

    @handler
    async def resolve(self, request: Resolve, caller: Caller) -> Resolved:
        """Park until the actor can be called under an incarnation larger than ``above``."""

        def find() -> ActorRecord | None:
            return self._registry.resolve(request.name, request.above, unready=request.unready)

        return Resolved(record=await self._registered.until(find, caller.park_s))

    # --- the run ---

    @handler
    async def watch_run(self, request: WatchRun, caller: Caller) -> RunState:
        """Park until the state, or the metrics where they are asked for, are newer than those that the caller has seen.

        A caller that does not ask for the metrics is not told of each actor that gets ready.
        """
        self._members.taken_in(caller.name, caller.incarnation, request.members)
        if request.seen_line < 0:

            def matters() -> RunState | None:
                # A number that this controller has not given tells nothing of what the caller knows.
                return None if self._run.matters <= request.seen <= self._run.number else self._state()

            return await self._watchers.until(matters, caller.park_s) or self._state()

        def news() -> RunState | None:
            if self._run.number != request.seen or self._lines.last > request.seen_line:
                return self._state_and_lines(request.seen_line)
            return None

        return await self._followers.until(news, caller.park_s) or self._state_and_lines(request.seen_line)

    @handler
    def metrics_line(self, request: MetricsLine, caller: Caller) -> None:
        """Keep a line for those who watch; the oldest goes when there are too many."""
        if not is_proper(request.line):
            self.counters.add("lines/refused")
            if self.counters["lines/refused"] == 1:
                said = str(request.line)[:LONGEST_TEXT]
                self.log.warning("a line of metrics is refused, as others may be", by=caller.name, line=said)
            return
        self._sinks.line(request.line)
        self._watching.lines.add(request.line, by=caller.incarnation)
        if request.line.get("kind") == "update":
            # Too many for those who follow the run step by step.
            return
        self._lines.add(request.line)
        self._followers.wake()

    @handler
    def notice(self, request: Notice, caller: Caller) -> Done:
        """Pass on what the user must know to those who follow the run step by step."""
        self._waits.take(caller.name, caller.incarnation, request.key, request.waits_for)
        self._lines.add_notice(caller.name, caller.incarnation, request)
        self._followers.wake()
        return Done()

    def notify(
        self, key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "", of: str = ""
    ) -> None:
        super().notify(key, text, count=count, meanwhile=meanwhile, waits_for=waits_for, of=of)
        # Nobody else takes its notices: actors hand theirs in to the controller.
        own = sendable(key, text, count, meanwhile, waits_for, of)
        self._lines.add_notice(self.name, self.context.incarnation, own)
        self._followers.wake()

    @handler
    def stop_run(self, request: StopRun, caller: Caller) -> Done:
        """End the run in good order, or let it make way first."""
        now = self.clock.now()
        # A successor that starts has a run behind it that has run.
        makes_way = request.preempt and (self._run.phase != "starting" or self._earlier is not None)
        if self._run.preempt(request.reason, now) if makes_way else self._run.stop(request.reason, now):
            what = "run is to make way" if makes_way else "run is stopped"
            self.log.info(what, by=caller.name, reason=request.reason)
            self._tell()
        return Done()

    @handler
    def run_finished(self, request: RunFinished, caller: Caller) -> Done:
        """All is trained, and written as far as it could be."""
        if self._run.finish(self.clock.now(), preempted=request.preempted, by=caller.name, failure=request.failure):
            self.log.info("run is finished", by=caller.name, preempted=request.preempted, failure=request.failure)
            self._tell()
        return Done()

    @handler
    def checkpoint_written(self, request: CheckpointWritten, caller: Caller) -> Done:
        """The run can go on from here."""
        self.log.info("checkpoint is complete", version=request.version, step=request.step, path=request.path)
        self._watching.happened("info", caller.name, f"checkpoint of version {request.version} is complete")
        if self._run.checkpoint_written(request.version):
            self._tell()
        return Done()

    @handler
    def actor_started(self, request: ActorStarted, caller: Caller) -> Done:
        """A process lives, of which nothing may ever be heard."""
        self._registry.started(request.name, request.incarnation, self.clock.now())
        self._registry_changed()
        return Done()

    @handler
    def actor_ended(self, request: ActorEnded, caller: Caller) -> EndNoted:
        """A process has ended; says whether it was told to."""
        now = self.clock.now()
        self.log.info("actor ended", actor=request.name, exit_code=request.exit_code, fatal=request.fatal)
        if request.exit_code or self._run.phase in ("starting", "running"):
            what = f": {request.reason}" if request.reason else f" with exit code {request.exit_code}"
            self._watching.happened("error" if request.fatal else "warning", request.name, f"ended{what}")
        told = (actor.name for actor in self._run.leaving)
        asked = role_of(request.name) in self._run.draining or request.name in told
        newest = self._registry.ended(request.name, request.incarnation, now, asked=asked)
        # A host on trial whose actor is given up is let go instead, and the run goes on.
        if newest and not (request.fatal and self._members.given_up(request.name, request.reason)):
            said = (request.name, request.exit_code, request.fatal, request.reason, request.log)
            self._run.ended(*said, now, incarnation=request.incarnation)
        self._registry_changed()
        return EndNoted(asked=asked)

    @handler
    def bring_back(self, request: BringBack, caller: Caller) -> Done:
        """Try a replica again that is set aside. Raises InvalidRequest."""
        if not self._run.bring_back(request.name, self.clock.now()):
            there = ", ".join(actor.name for actor in self._run.aside) or "nobody"
            raise InvalidRequest(f"{request.name} cannot be brought back: set aside is {there}")
        self._tell()
        return Done()

    @handler
    def report_failure(self, request: ReportFailure, caller: Caller) -> Done:
        """An actor says that the run cannot go on."""
        reason = request.reason.removeprefix(f"{caller.name}: ")
        self.log.error("run has failed", actor=caller.name, reason=reason)
        if self._run.fail(caller.name, reason, "", request.exit_code, self.clock.now()):
            self._tell()
        return Done()

    # --- watching ---

    @handler
    async def watch_snapshot(self, request: WatchSnapshot, caller: Caller) -> SnapshotTaken:
        """Park until there is a newer snapshot of the run."""
        return await self._watching.snapshots.watch(request, caller)

    @handler
    async def watch_metrics(self, request: WatchMetrics, caller: Caller) -> Metrics:
        """Park until there is something for the sinks."""
        return await self._sinks.watch(request, caller)

    # --- the timeline ---

    @handler
    async def request_trace(self, request: RequestTrace, caller: Caller) -> TraceWritten:
        """Have the actors hand in what they did of late, and write it."""
        return await self._traces.write(self.tasks, caller.park_s)

    @handler
    async def trace_part(self, request: TracePart, caller: Caller) -> Done:
        """Take in what an actor did. Raises InvalidRequest."""
        await self._traces.take(caller.name, request)
        return Done()

    def _ask_for_trace(self, number: int) -> None:
        if self._run.want_trace(number):
            self._tell()

    # --- hosts that come and go ---

    @handler
    async def join(self, request: Join, caller: Caller) -> Joined:
        """Let hosts take part. Raises InvalidRequest."""
        return await self._members.join(request, caller.park_s)

    @handler
    async def leave(self, request: Leave, caller: Caller) -> LeaveBegun:
        """Drain a host and let it go. Raises InvalidRequest."""
        return await self._members.leave(request, caller.park_s)

    @handler
    async def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        """Park until others have come, leave, or have left."""
        return await self._members.watch(request.seen, caller.park_s)

    @handler
    async def host_left(self, request: HostLeft, caller: Caller) -> Done:
        """Nothing is left on a host that was to leave."""
        try:
            await self._members.host_left(caller.name, caller.park_s)
        finally:
            # Also where that is not on disk in time: the actors of the host have ended.
            self._registry_changed()
        return Done()

    def _members_changed(self) -> None:
        # A successor does not wait for those who have left either.
        self._to_keep.set()
        self._tell()

    # --- waiting ---

    def _registry_changed(self) -> None:
        """Let the run follow, at once or, where there are many actors, together with the changes that come next."""
        if len(self._registry.entries) <= FEW_ACTORS:
            self._follow()
        else:
            self._gathered.set()

    async def _follow_registry(self) -> None:
        while True:
            await self._gathered.wait()
            self._gathered.clear()
            self._follow()
            await asyncio.sleep(GATHER_S)

    def _follow(self) -> None:
        """Let the run follow the registry, and wake those who wait for either."""
        ready = self._registry.ready()
        # First: those that have joined belong to the run from here on, and all that follows counts them.
        self._members.ready(ready)
        if self._numbered != self._registry.changes:
            self._numbered = self._registry.changes
            self._to_keep.set()
        self._run.ready(ready, self.clock.now())
        self._run.condemn(self._registry.condemned)
        self._run.bury(self._registry.dead)
        self._run.tell_generations(self._registry.generations)
        self._registered.wake()
        self._tell()

    def _state_and_lines(self, seen_line: int) -> RunState:
        lines, last = self._lines.after(seen_line)
        # While the run drains, actors end in order and no notice says what it waits for.
        waits = self._waits.words(self._registry.hears) if not self._run.drain else []
        awaited = self._run.waiting_for
        return msgspec.structs.replace(self._state(), lines=lines, last_line=last, waiting_for=awaited, waits=waits)

    def _state(self) -> RunState:
        if self._said is None or self._said[0] != self._run.number:
            self._said = self._run.number, self._make_state()
        return self._said[1]

    def _make_state(self) -> RunState:
        outcome = self._run.outcome
        return RunState(
            number=self._run.number,
            phase=self._run.phase,
            draining=self._run.draining,
            reason=outcome.reason if outcome else self._run.preempted_by,
            failed_actor=outcome.actor if outcome else "",
            log=outcome.log if outcome else "",
            exit_code=outcome.exit_code if outcome else 0,
            condemned=self._run.condemned,
            stuck=self._run.stuck,
            checkpoint=self._run.checkpoint,
            dead=self._run.dead,
            lost_hosts=dict(self._run.lost_hosts),
            members=self._run.members,
            leaving=self._run.leaving,
            trace=self._run.trace,
            generations=self._run.generations,
            aside=self._run.aside,
        )

    def _tell_aside(self) -> None:
        """The user hears of each replica that is set aside, and again when it is tried."""
        before, self._aside = self._aside, {actor.name: actor for actor in self._run.aside}
        for name, actor in self._aside.items():
            if name not in before:
                self._times_aside[name] = times = self._times_aside.get(name, 0) + 1
                again = f"after {actor.rest_s:g} s, or by asyncrl-launch --bring-back {name} RUN"
                meanwhile = f"The run goes on without it; it is tried again {again}"
                self.notify(f"aside {name}", f"{name} is set aside: {actor.reason}", count=times, meanwhile=meanwhile)
        # While the run drains none counts as set aside, and none is tried again for that.
        for name in before.keys() - self._aside.keys() if not self._run.drain else ():
            then = "is tried again" if name in self._run.expected else "has left the run"
            text = f"{name} was set aside ({before[name].reason}) and {then}"
            self.notify(f"aside {name}", text, count=self._times_aside[name])

    def _tell(self) -> None:
        self._tell_aside()
        self._watching.changed()
        if SINKS in self._run.draining:
            self._sinks.end()
        self._changed.set()
        self._watchers.wake()
        self._followers.wake()
        self._members.wake()

"""The controller: registry of actors, state of the run, failure detection, metrics for viewers. No bulk data passes it.

It binds its port before any other actor starts, and writes its address to the run's private folder for the node agent.
``RunStateMachine`` and ``Registry`` decide; this class passes messages and the time on to them, and wakes parked calls
after a change. The controller ends when the state of the run is final. It refuses messages of older incarnations.

A controller leaves three things on disk for its successor: the address file, the members and the recorded snapshots.
The address file has its address, the list of hosts and the newest incarnations (succession.py). The members say which
hosts joined or left. The successor has the same key and binds the same address. It learns everything else from the
actors and agents as they register again. It numbers its states above those of its predecessor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.controller.health.failure_detector import FailureDetector
from asyncrl.controller.health.known_hosts import KnownHosts
from asyncrl.controller.joining.host_changes import HostChanges
from asyncrl.controller.observation.observation import Observation
from asyncrl.controller.observation.recent_lines import LONGEST_TEXT, OpenWaits, RecentLines, is_proper
from asyncrl.controller.observation.sinks_feed import SinksFeed
from asyncrl.controller.observation.traces import Traces, remove_unfinished
from asyncrl.controller.state.reserve import SINKS, RestNotices
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.controller.succession import Succession
from asyncrl.core.errors import InvalidRequest, Refused
from asyncrl.core.roles import role_of
from asyncrl.messages import Done
from asyncrl.messages.actors import (
    ActorEnded,
    ActorRecord,
    ActorStarted,
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
from asyncrl.messages.monitor import Heartbeat, MetricsLine
from asyncrl.rpc.actor import CONTROLLER, ActorContext, Caller, handler
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.lifecycle.registry import Registry
from asyncrl.rpc.parking_lot import ParkingLot

FEW_ACTORS = 64
"""Up to this number of actors, each change of the registry is handled at once."""
GATHER_S = 0.05
"""With more actors, the pause in which further changes are collected (s). Handling a change reads all actors, so a
thousand that register one by one would cost a million reads."""
FAREWELL_S = 0.3
"""Pause at the end of the controller in which its last messages leave the sockets (s)."""


class Controller(RunActor):
    """The controller of one run."""

    role = "controller"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.registry = Registry()
        self.machine = RunStateMachine(
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
        self._hosts = KnownHosts(
            supervision.host_lost_s,
            supervision.heartbeat_s,
            # Within this time the host's guard kills a frozen agent, and then the whole host is silent.
            frozen_s=supervision.agent_silence_s + supervision.host_lost_s,
        )
        self._lines = RecentLines()
        """Newest lines for the launcher: metrics, notices, and actors that are ready again."""
        self._waits = OpenWaits()
        self._sinks = SinksFeed(
            self.counters, numbers_begin_above(context.incarnation), wanted=self.config.sinks.are_wanted
        )
        self.traces = Traces(self)
        self._rest_notices = RestNotices()
        self._changed = asyncio.Event()
        """Set when the run's state, and thus its next deadline, may have changed."""
        self._gathered = asyncio.Event()
        """Set when the registry has changes that are not handled yet."""
        self._watchers = ParkingLot()
        """WatchRun calls of actors, which wait for a new state of the run."""
        self._followers = ParkingLot()
        """WatchRun calls that also wait for metrics, notices, and actors that get ready, as the launcher's."""
        self._registered = ParkingLot()
        """Resolve calls, which wait for an actor's address."""
        # The hosts that join or leave, and the actors on them.
        self.members = HostChanges(self, self._hosts, changed=self._members_changed)
        self._observation = Observation(self, self._sinks)
        self._failures = FailureDetector(self, self._hosts, self._observation)
        self._succession = Succession(self, self._hosts, self._observation)
        if (earlier := self._succession.earlier) is not None:
            self.registry.recall(earlier.newest, earlier.generations)
            self.machine.follow_registry(self.registry.condemned, self.registry.dead, self.registry.generations)
        # Before the first bind: a host that has joined knows the address and connects as soon as it is bound.
        self.roster.take_in(self.members.members)

    async def setup(self) -> None:
        """Take over from an earlier controller, and write the address file."""
        self.machine.checkpoint = await asyncio.to_thread(self._newest_checkpoint)
        await asyncio.to_thread(remove_unfinished, self.context.run_dir)
        await self._succession.take_over()

    def _bind_address(self) -> str:
        """Address of an earlier incarnation, or the configured one."""
        if (earlier := self._succession.earlier) is not None and earlier.address:
            return earlier.address
        network = self.config.network
        return f"tcp://{self.context.host}:{network.controller_port or network.ports}"

    def _newest_checkpoint(self) -> int:
        """Version of the newest complete checkpoint on disk; -1 without one. Blocks."""
        try:
            newest = CheckpointFolder(checkpoint_dir(self.config, self.context.run_dir)).newest()
        except OSError as error:
            self.log.warning("checkpoints cannot be read here", error=str(error))
            return -1
        return newest.version if newest is not None else -1

    def handling_parts(self) -> Iterable[object]:
        return (self, self.members, self._observation.snapshots, self._sinks, self.traces)

    async def close(self) -> None:
        """Count the metrics lines that the sinks did not get."""
        self._sinks.close()

    async def run(self) -> None:
        """Start the background tasks, then handle the deadlines of the run until its state is final.

        Then take the last snapshot and finish the last trace.
        """
        self.tasks.create_task(self._failures.run())
        self.tasks.create_task(self._succession.run())
        self.tasks.create_task(self._follow_registry())
        self.tasks.create_task(self._observation.run())
        self.tasks.create_task(self.members.run())
        while not self.machine.final:
            deadline = self.machine.next_deadline()
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self.clock.now())):
                    await self._changed.wait()
            except TimeoutError:
                self.log.debug("a deadline of the run has come")
            self._changed.clear()
            if self.machine.tick(self.clock.now()):
                self.state_changed()
        await self._observation.conclude()
        await self.traces.finish()
        await asyncio.sleep(FAREWELL_S)

    # --- registry ---

    @handler
    def register(self, request: Register, caller: Caller) -> Done:
        """Register an actor, or change its record. A record with an address says that the actor is ready.

        Raises Refused for a wrong name, or an incarnation that is older, has ended or is condemned.
        """
        if (request.record.name, request.record.incarnation) != (caller.name, caller.incarnation):
            raise Refused(self.name, "name", ours=caller.name, theirs=request.record.name)
        try:
            self.registry.register(request.record, self.clock.now())
            self.machine.started(request.record.name)
            if self._hosts.register(request.record, self.clock.now()):
                self._succession.changed()
            self.log.info("registered", actor=request.record.name, address=request.record.address)
            if request.record.address and self.machine.phase != "starting":
                self._observation.happened("info", request.record.name, "is ready again")
            if request.record.address and request.record.attempt:
                self._lines.add_ready(request.record.name)
        finally:
            # Also after a refusal, because the registry enters an actor of an old generation as condemned.
            self.registry_changed()
        return Done()

    @handler
    def heartbeat_of(self, request: Heartbeat, caller: Caller) -> None:
        """Store a heartbeat and add its events.

        While the run starts, wake the launcher's call if the actor's stage (``_with_stage``) has changed. Ignores a
        heartbeat that is not the newest one of the living incarnation.
        """
        stage_before = self._with_stage(caller.name)
        if not self.registry.heartbeat(caller.name, caller.incarnation, request, self.clock.now()):
            # A heartbeat that comes before its actor has registered is no error.
            if caller.name in self.registry.entries:
                self.counters.add("heartbeats/ignored")
            return
        entry = self.registry.entries[caller.name]
        entry.version = caller.param_version
        self.counters["heartbeats/left_out"] = self.registry.left_out
        self._observation.add_events(entry)
        if self.machine.phase == "starting" and self._with_stage(caller.name) != stage_before:
            self.machine.stage_changed()
            self._followers.wake()

    @handler
    async def resolve(self, request: Resolve, caller: Caller) -> Resolved:
        """Park until the caller can call an incarnation of the actor above ``above``; answer with its record.

        With ``unready`` a record with facts is enough. If the caller's time ends first, answers without a record.
        """

        def find() -> ActorRecord | None:
            if not self.members.know_each_other(caller.name, request.name):
                return None
            return self.registry.resolve(request.name, request.above, unready=request.unready)

        return Resolved(record=await self._registered.until(find, caller.park_s))

    # --- the run ---

    @handler
    async def watch_run(self, request: WatchRun, caller: Caller) -> RunState:
        """Park until there is news for the caller: a new state and, if the caller asks for them, new lines.

        ``seen`` and ``seen_line`` are the numbers of the newest state and line that the caller has. A caller without
        ``seen_line`` (below 0), as an actor, is not woken by changes that matter to the launcher only. The call also
        notes which revision of the members the caller has admitted.
        """
        if self.members.taken_in(caller.name, request.members):
            self._registered.wake()
        if request.seen_line < 0:

            def matters() -> RunState | None:
                # None if the caller has seen all changes that matter to it. A larger number is another controller's.
                return None if self.machine.matters <= request.seen <= self.machine.number else self.machine.message

            return await self._watchers.until(matters, caller.park_s) or self.machine.message

        def news() -> RunState | None:
            if self.machine.number != request.seen or self._lines.last > request.seen_line:
                return self._state_and_lines(request.seen_line)
            return None

        return await self._followers.until(news, caller.park_s) or self._state_and_lines(request.seen_line)

    @handler
    def metrics_line(self, request: MetricsLine, caller: Caller) -> None:
        """Pass a metrics line to the sinks and the viewers, and to the launcher except lines of weight updates.

        A malformed line is counted and dropped.
        """
        if not is_proper(request.line):
            self.counters.add("lines/refused")
            if self.counters["lines/refused"] == 1:
                shown = str(request.line)[:LONGEST_TEXT]
                self.log.warning("a line of metrics is refused, as others may be", by=caller.name, line=shown)
            return
        self._sinks.line(request.line)
        self._observation.lines.add(request.line, by=caller.incarnation)
        if request.line.get("kind") == "update":
            # The launcher shows no weight updates.
            return
        self._lines.add(request.line)
        self._followers.wake()

    @handler
    def notice(self, request: Notice, caller: Caller) -> Done:
        """Keep a notice and its wait, and wake the launcher's call, which shows it."""
        self._waits.take(caller.name, caller.incarnation, request.key, request.waits_for)
        self._lines.add_notice(caller.name, caller.incarnation, request)
        self._followers.wake()
        return Done()

    def pass_on(self, notice: Notice) -> None:
        """Keep a notice of the controller itself, without a message."""
        self._lines.add_notice(self.name, self.context.incarnation, notice)
        self._followers.wake()

    @handler
    def stop_run(self, request: StopRun, caller: Caller) -> Done:
        """End the run in good order, or preempt it. During the first start a preemption ends it too.

        A run without steps only evaluates: it has nothing to keep, so a preemption ends it.
        """
        now = self.clock.now()
        # Under a restarted controller the run was running before, even if the phase is "starting" again.
        has_begun = self.machine.phase != "starting" or self._succession.earlier is not None
        is_preempted = request.preempt and has_begun and self.config.learner.steps > 0
        if self.machine.preempt(request.reason, now) if is_preempted else self.machine.stop(request.reason, now):
            what = "run is preempted" if is_preempted else "run is stopped"
            self.log.info(what, by=caller.name, reason=request.reason)
            self.state_changed()
        return Done()

    @handler
    def run_finished(self, request: RunFinished, caller: Caller) -> Done:
        """Let the run drain: the learner has ended its work, after the last step or a preemption."""
        if self.machine.finish(self.clock.now(), preempted=request.preempted, by=caller.name, failure=request.failure):
            self.log.info("run is finished", by=caller.name, preempted=request.preempted, failure=request.failure)
            self.state_changed()
        return Done()

    @handler
    def checkpoint_written(self, request: CheckpointWritten, caller: Caller) -> Done:
        """Note a complete checkpoint."""
        self.log.info("checkpoint is complete", version=request.version, step=request.step, path=request.path)
        self._observation.happened("info", caller.name, f"checkpoint of version {request.version} is complete")
        if self.machine.checkpoint_written(request.version):
            self.state_changed()
        return Done()

    @handler
    def actor_started(self, request: ActorStarted, caller: Caller) -> Done:
        """Note that an agent has started a process. It may die before it registers."""
        self.registry.started(request.name, request.incarnation, self.clock.now())
        self.registry_changed()
        return Done()

    @handler
    def actor_ended(self, request: ActorEnded, caller: Caller) -> EndNoted:
        """Note the end of a process, which its agent reports. The reply says whether the actor was asked to end.

        ``fatal``: the agent has given the actor up.
        """
        now = self.clock.now()
        self.log.info("actor ended", actor=request.name, exit_code=request.exit_code, fatal=request.fatal)
        if request.exit_code or self.machine.phase in ("starting", "running"):
            what = f": {request.reason}" if request.reason else f" with exit code {request.exit_code}"
            self._observation.happened("error" if request.fatal else "warning", request.name, f"ended{what}")
        leaving = (actor.name for actor in self.machine.leaving)
        asked = role_of(request.name) in self.machine.draining or request.name in leaving
        newest = self.registry.ended(request.name, request.incarnation, now, asked=asked)
        if newest:
            end = (request.name, request.exit_code, request.fatal, request.reason, request.log)
            self.machine.ended(*end, now, incarnation=request.incarnation)
        self.registry_changed()
        return EndNoted(asked=asked)

    @handler
    def bring_back(self, request: BringBack, caller: Caller) -> Done:
        """End the rest of a replica, which was stopped because it could not be kept alive (state/reserve.py).

        Raises InvalidRequest if it is not resting, or if the run drains or is preempted.
        """
        if not self.machine.bring_back(request.name, self.clock.now()):
            resting = ", ".join(actor.name for actor in self.machine.resting) or "no replica"
            raise InvalidRequest(f"{request.name} cannot be brought back: {resting} is resting")
        self.state_changed()
        return Done()

    @handler
    def report_failure(self, request: ReportFailure, caller: Caller) -> Done:
        """End the run because of an actor's failure, unless the run does not count on the actor."""
        reason = request.reason.removeprefix(f"{caller.name}: ")
        if self.members.can_spare(caller.name):
            # The end of its process follows, and its agent gives it up.
            self.log.error("an actor has failed that the run can spare", actor=caller.name, reason=reason)
            return Done()
        self.log.error("run has failed", actor=caller.name, reason=reason)
        if self.machine.fail(caller.name, reason, "", request.exit_code, self.clock.now()):
            self.state_changed()
        return Done()

    def _members_changed(self) -> None:
        # A successor reads the hosts from the file, and must not wait for hosts that have left.
        self._succession.changed()
        self.state_changed()

    # --- waiting ---

    def registry_changed(self) -> None:
        """Handle the changes of the registry: at once with few actors, else within GATHER_S."""
        if len(self.registry.entries) <= FEW_ACTORS:
            self._update_from_registry()
        else:
            self._gathered.set()

    async def _follow_registry(self) -> None:
        while True:
            await self._gathered.wait()
            self._gathered.clear()
            self._update_from_registry()
            await asyncio.sleep(GATHER_S)

    def _update_from_registry(self) -> None:
        """Update the run's state from the registry, and wake the calls that wait for a change of either."""
        ready = self.registry.ready()
        self._succession.follow_registry()
        self.machine.ready(ready, self.clock.now())
        self.machine.follow_registry(self.registry.condemned, self.registry.dead, self.registry.generations)
        self._registered.wake()
        self.state_changed()

    def _state_and_lines(self, seen_line: int) -> RunState:
        """Return the run's state for the launcher: with the lines after number ``seen_line`` and the open waits."""
        lines, last = self._lines.after(seen_line)
        # While the run drains, actors end, and their waits no longer show what the run waits for.
        waits = self._waits.words(self.registry.hears) if not self.machine.drain else []
        awaited = [self._with_stage(name) for name in self.machine.waiting_for]
        return msgspec.structs.replace(
            self.machine.message, lines=lines, last_line=last, waiting_for=awaited, waits=waits
        )

    def _with_stage(self, name: str) -> str:
        """The actor's name, with its stage while it starts: "learner/0 (checkpoint)"."""
        entry = self.registry.entries.get(name)
        beat = entry.heartbeat if entry is not None else None
        return f"{name} ({beat.awaiting})" if beat is not None and beat.state == "starting" and beat.awaiting else name

    def state_changed(self) -> None:
        """Wake all calls and tasks that wait for the run's state, after each change of it.

        Also notify the user of replicas that begin to rest (state/reserve.py) or are back. End the feed of sinks that
        have to drain.
        """
        run = self.machine
        # A host on trial has joined and does not serve so far, and leaves once all of its rollouters rest. So the user
        # hears of their rests only once the host serves.
        on_trial = self.members.on_trial
        resting = [replica for replica in run.resting if replica.name not in on_trial]
        for key, text, count, meanwhile in self._rest_notices.news(resting, run.expected, drains=bool(run.drain)):
            self.notify(key, text, count=count, meanwhile=meanwhile)
        self._observation.changed()
        if SINKS in self.machine.draining:
            self._sinks.end()
        self._changed.set()
        self._watchers.wake()
        self._followers.wake()
        self.members.wake()

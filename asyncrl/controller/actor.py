"""The controller: registry, run state, fan-out of metrics, watchdog. No bulk data passes through it.

Its own port is bound before anything else of the run is started; it leaves its address in the run's private
folder, where the node agent finds it. Everything that is decided is decided in ``run_state`` and
``registry``; this shell turns messages and time into their events, and wakes parked calls when something
changed. It ends by itself once the state of the run is final. What an actor of an older incarnation says is
refused.

It keeps nothing but its address, the list of hosts, and who has joined and left: a successor binds the same address, is
told everything else anew by the actors and agents that come back to it, knows by the list who may not, and numbers its
states above all that were seen before.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.controller.blame import Seen, silence_in_words
from asyncrl.controller.coming_and_going import MEMBERS_FILE, ComingAndGoing
from asyncrl.controller.hosts import Hosts
from asyncrl.controller.run_state import RunStateMachine
from asyncrl.controller.sight import look_at
from asyncrl.controller.watchdog import Report, Watchdog
from asyncrl.errors import InvalidRequest, Refused
from asyncrl.messages import (
    ActorEnded,
    ActorRecord,
    ActorStarted,
    CheckpointWritten,
    Condemned,
    Done,
    EndNoted,
    Heartbeat,
    HostLeft,
    Join,
    Joined,
    Leave,
    LeaveBegun,
    Members,
    MetricsLine,
    Register,
    ReportFailure,
    Resolve,
    Resolved,
    RunFinished,
    RunState,
    StopRun,
    Stuck,
    WatchMembers,
    WatchRun,
)
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.runtime.parking import ParkingLot
from asyncrl.runtime.registry import Registry
from asyncrl.runtime.roster import LAUNCHER
from asyncrl.runtime.server import REFUSED
from asyncrl.runtime.supervision import role_of

ADDRESS_FILE = "controller.json"
"""In the run's private folder: ``{"address": ..., "incarnation": ..., "hosts": ...}``."""
LINES_KEPT = 1000
LINES_IN_REPLY = 100
STACKS_BEATS = 3
"""Heartbeats that a culprit has to tell its stacks before the run ends because of it."""
FAREWELL_S = 0.3
"""Time that the last state has to leave the sockets."""


class Controller(Actor):
    """See the module."""

    role = "controller"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._registry = Registry()
        self._run = RunStateMachine(
            expected=frozenset(self.config.actors) - {CONTROLLER},
            now=self.clock.now(),
            start_timeout_s=self.config.supervision.start_timeout_s,
            drain_s=self.config.supervision.drain_s,
            grace_s=self.config.preempt.grace_s,
            host_grace_s=self.config.supervision.host_grace_s,
            number=context.incarnation,
        )
        self._watchdog = Watchdog(self.config.watchdog, self.config.supervision.heartbeat_s)
        self._hosts = Hosts(self.config.supervision.host_lost_s, self.config.supervision.heartbeat_s, CONTROLLER)
        self._hosts_changed = asyncio.Event()
        self._silent: list[Stuck] = []
        """Who is to be killed for its silence."""
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self._last_line = 0
        self._changed = asyncio.Event()
        self._watchers = ParkingLot()
        self._registered = ParkingLot()
        self._members = ComingAndGoing(
            curve=context.credentials.curve,
            start_timeout_s=self.config.supervision.start_timeout_s,
            registry=self._registry,
            run=self._run,
            hosts=self._hosts,
            peers=lambda: self.roster.peers,
            take_in=self.take_in,
            tell=self._members_changed,
            write=_write_atomically,
            path=self._address_file.with_name(MEMBERS_FILE),
            now=self.clock.now,
            log=self.log,
        )
        # Before the first bind: who has joined knows the address, and knocks as soon as it is there.
        self._members.recall()
        self.roster.take_in(self._members.members)

    async def setup(self) -> None:
        """Leave the address where the agent looks for it."""
        self._run.checkpoint = await asyncio.to_thread(self._newest_checkpoint)
        self._hosts.recall(self._read_address_file().get("hosts", {}), self.clock.now())
        await self._write_address_file()

    def _read_address_file(self) -> dict[str, Any]:
        """As an earlier incarnation left it; empty for the first one."""
        try:
            found: dict[str, Any] = json.loads(self._address_file.read_text())
        except FileNotFoundError:
            return {}
        return found

    async def _write_address_file(self) -> None:
        hosts = self._hosts.describe()
        text = json.dumps({"address": self.address, "incarnation": self.context.incarnation, "hosts": hosts})
        await asyncio.to_thread(_write_atomically, str(self._address_file), text)

    async def _keep_hosts(self) -> None:
        """For a successor, which is not told of a host that is lost."""
        while True:
            await self._hosts_changed.wait()
            self._hosts_changed.clear()
            try:
                await self._write_address_file()
            except OSError as error:
                self.log.warning("list of hosts is not kept", error=str(error))

    @property
    def _address_file(self) -> Path:
        return self.context.run_dir / "private" / ADDRESS_FILE

    def _bind_address(self) -> str:
        """Where an earlier incarnation was, or as configured."""
        if earlier := self._read_address_file().get("address"):
            return str(earlier)
        network = self.config.network
        return f"tcp://{self.context.host}:{network.controller_port or network.ports}"

    def _newest_checkpoint(self) -> int:
        try:
            found = CheckpointFolder(checkpoint_dir(self.config, self.context.run_dir)).newest()
        except OSError as error:
            self.log.warning("checkpoints cannot be read here", error=str(error))
            return -1
        return found.version if found is not None else -1

    async def run(self) -> None:
        """Let time act on the run until its state is final."""
        self.tasks.create_task(self._watch_heartbeats())
        self.tasks.create_task(self._keep_hosts())
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
        await asyncio.sleep(FAREWELL_S)

    async def _watch_heartbeats(self) -> None:
        supervision = self.config.supervision
        while True:
            await asyncio.sleep(supervision.heartbeat_s)
            now = self.clock.now()
            seen = look_at(self._registry, self._run.expected, now)
            self._look_after_hosts(now)
            # An agent is judged by what else is on its host, and on a host that may be lost nobody is.
            silent = [
                actor
                for actor in self._registry.silent(now, supervision.silence_s)
                if actor.name in self._run.expected and not self._hosts.in_doubt(actor.name, self._registry, now)
            ]
            self._name_silent(silent, seen)
            self._condemn(silent)
            if self._watchdog.look(seen, self._run.phase, now):
                self._on_report(self._watchdog.report)

    def _look_after_hosts(self, now: float) -> None:
        """Take the actors of a lost host for dead, and wait for those of one that is back."""
        lost, back = self._hosts.look(self._registry, now)
        for host in back:
            self.log.warning("host is back", host=str(host), actors=sorted(host.actors))
            self._run.host_back(str(host), now)
        for host in lost:
            self.log.error("host is lost", host=str(host), actors=sorted(host.actors))
            reason = f"its host {host} was silent for {self.config.supervision.host_lost_s:g} s"
            self._registry.lose(sorted(host.actors), reason)
            if not self._members.host_lost(host):
                self._run.host_lost(str(host), host.actors, now)
        if lost or back:
            self._registry_changed()

    def _name_silent(self, silent: Sequence[Condemned], seen: Mapping[str, Seen]) -> None:
        """Say so before they are killed."""
        condemned = {(actor.name, actor.incarnation) for actor in (*self._registry.condemned, *silent)}
        self._silent = [actor for actor in self._silent if (actor.name, actor.incarnation) in condemned]
        for actor in silent:
            words = silence_in_words(seen[actor.name]) if actor.name in seen else f"{actor.name}: {actor.reason}"
            self._silent.append(Stuck(actor.name, actor.incarnation, words, self.context.incarnation))
        self._tell_stuck()

    def _on_report(self, report: Report | None) -> None:
        """Say it to everybody, and do what the configuration wants done then."""
        self._tell_stuck()
        if report is None:
            self.log.info("run moves again")
            return
        self.log.error("run has stalled", culprit=report.name, report=report.text, number=report.number)
        match self.config.watchdog.policy:
            case "restart":
                reason = f"it held up the run for {self.clock.now() - report.since:.0f} s (watchdog.policy)"
                self._condemn([Condemned(report.name, report.incarnation, reason)])
            case "stop":
                self.tasks.create_task(self._stop_for(report))

    async def _stop_for(self, report: Report) -> None:
        """Fail, unless the run moves again before the culprit has told its stacks."""
        await asyncio.sleep(STACKS_BEATS * self.config.supervision.heartbeat_s)
        held = self._watchdog.report
        if held is not None and held.since == report.since:
            self._run.fail(report.name, report.text, "", 1, self.clock.now())
            self._tell()

    def _tell_stuck(self) -> None:
        report = self._watchdog.report
        held_up = list(self._silent)
        if report is not None:
            # Numbered above those of an earlier controller.
            number = self.context.incarnation + report.number
            held_up.append(Stuck(report.name, report.incarnation, report.text, number))
        if self._run.name_stuck(held_up):
            self._tell()

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
                self._hosts_changed.set()
            self.log.info("registered", actor=request.record.name, address=request.record.address)
        finally:
            self._registry_changed()
        return Done()

    @handler
    def heartbeat_of(self, request: Heartbeat, caller: Caller) -> None:
        """Note a heartbeat. Its absence is a stall: its process is killed before anybody counts it as dead."""
        if not self._registry.heartbeat(caller.name, caller.incarnation, request, self.clock.now()):
            self.counters["heartbeats/ignored"] = self.counters.get("heartbeats/ignored", 0) + 1
            return
        self._registry.entries[caller.name].version = caller.param_version

    @handler
    async def resolve(self, request: Resolve, caller: Caller) -> Resolved:
        """Parked until the actor can be called under an incarnation larger than ``above``."""

        def find() -> ActorRecord | None:
            return self._registry.resolve(request.name, request.above, unready=request.unready)

        return Resolved(record=await self._registered.until(find, caller.park_s))

    # --- the run ---

    @handler
    async def watch_run(self, request: WatchRun, caller: Caller) -> RunState:
        """Parked until the state, or where asked for the metrics, are newer than what the caller has seen."""
        wants_lines = request.seen_line >= 0

        def news() -> RunState | None:
            if self._run.number != request.seen or (wants_lines and self._last_line > request.seen_line):
                return self._state(request.seen_line)
            return None

        self._members.taken_in(caller.name, caller.incarnation, request.members)
        return await self._watchers.until(news, caller.park_s) or self._state(request.seen_line)

    @handler
    def metrics_line(self, request: MetricsLine, caller: Caller) -> None:
        """Keep a line for whoever watches; the oldest goes when there are too many."""
        self._lines.append(request.line)
        self._last_line += 1
        self._watchers.wake()

    @handler
    def stop_run(self, request: StopRun, caller: Caller) -> Done:
        """End the run in good order, or let it make way first."""
        now = self.clock.now()
        if self._run.preempt(now) if request.preempt else self._run.stop(request.reason, now):
            what = "run is to make way" if request.preempt else "run is stopped"
            self.log.info(what, by=caller.name, reason=request.reason)
            self._tell()
        return Done()

    @handler
    def run_finished(self, request: RunFinished, caller: Caller) -> Done:
        """All is trained and written."""
        if self._run.finish(self.clock.now(), preempted=request.preempted):
            self.log.info("run is finished", by=caller.name, preempted=request.preempted)
            self._tell()
        return Done()

    @handler
    def checkpoint_written(self, request: CheckpointWritten, caller: Caller) -> Done:
        """The run can go on from here."""
        self.log.info("checkpoint is complete", version=request.version, step=request.step, path=request.path)
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
        newest = self._registry.ended(request.name, request.incarnation, now, request.died)
        if newest and not (request.fatal and self._members.given_up(request.name, request.reason)):
            self._run.ended(request.name, request.exit_code, request.fatal, request.reason, request.log, now)
        self._registry_changed()
        told = (actor.name for actor in self._run.leaving)
        return EndNoted(asked=role_of(request.name) in self._run.draining or request.name in told)

    @handler
    def report_failure(self, request: ReportFailure, caller: Caller) -> Done:
        """An actor says that the run cannot go on."""
        reason = request.reason.removeprefix(f"{caller.name}: ")
        self.log.error("run has failed", actor=caller.name, reason=reason)
        if self._run.fail(caller.name, reason, "", request.exit_code, self.clock.now()):
            self._tell()
        return Done()

    # --- hosts that come and go ---

    @handler
    async def join(self, request: Join, caller: Caller) -> Joined:
        """Let hosts take part. Raises InvalidRequest."""
        self._must_be_launcher(caller)
        return await self._members.join(request, caller.park_s)

    @handler
    async def leave(self, request: Leave, caller: Caller) -> LeaveBegun:
        """Drain a host and let it go. Raises InvalidRequest."""
        self._must_be_launcher(caller)
        return await self._members.leave(request, caller.park_s)

    @handler
    async def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        """Parked until others have come, leave, or have left."""
        return await self._members.watch(request.seen, caller.park_s)

    @handler
    async def host_left(self, request: HostLeft, caller: Caller) -> Done:
        """Nothing is left on a host that was to leave."""
        try:
            await self._members.host_left(caller.name, caller.park_s)
        finally:
            self._registry_changed()
        return Done()

    def _members_changed(self) -> None:
        # Who has left is not waited for by a successor either.
        self._hosts_changed.set()
        self._tell()

    def _must_be_launcher(self, caller: Caller) -> None:
        if caller.name != LAUNCHER:
            self._endpoint.count(REFUSED)
            raise InvalidRequest(f"{caller.name} lets nobody join or leave: {LAUNCHER} does")

    # --- waiting ---

    def _condemn(self, actors: Sequence[Condemned]) -> None:
        """Have exactly these killed and started again, each with its gang."""
        if actors:
            self._registry.condemn(actors)
            self.log.error("actors are condemned", actors={actor.name: actor.reason for actor in actors})
            self._registry_changed()

    def _registry_changed(self) -> None:
        """Let the run follow, and wake whoever waits for either."""
        ready = self._registry.ready()
        self._members.ready(ready)
        self._run.ready(ready, self.clock.now())
        self._run.condemn(self._registry.condemned)
        self._run.bury(self._registry.dead)
        self._registered.wake()
        self._tell()

    def _state(self, seen_line: int) -> RunState:
        outcome = self._run.outcome
        lines: list[dict[str, Any]] = []
        last = self._last_line
        if seen_line >= 0:
            first = max(seen_line, last - len(self._lines))
            skipped = len(self._lines) - (last - first)
            lines = list(islice(self._lines, skipped, skipped + LINES_IN_REPLY))
            last = first + len(lines)
        return RunState(
            number=self._run.number,
            phase=self._run.phase,
            draining=self._run.draining,
            reason=outcome.reason if outcome else "",
            failed_actor=outcome.actor if outcome else "",
            log=outcome.log if outcome else "",
            exit_code=outcome.exit_code if outcome else 0,
            last_line=last,
            lines=lines,
            waiting_for=self._run.waiting_for,
            condemned=self._run.condemned,
            stuck=self._run.stuck,
            checkpoint=self._run.checkpoint,
            dead=self._run.dead,
            lost_hosts=dict(self._run.lost_hosts),
            members=self._run.members,
            leaving=self._run.leaving,
        )

    def _tell(self) -> None:
        self._changed.set()
        self._watchers.wake()
        self._members.wake()


def _write_atomically(path: str, text: str) -> None:
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


ACTOR = Controller

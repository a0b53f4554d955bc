"""The controller: registry, run state, fan-out of metrics. No bulk data passes through it.

Its own port is bound before anything else of the run is started; it leaves its address in the run's private
folder, where the node agent finds it. Everything that is decided is decided in ``run_state`` and
``registry``; this shell turns messages and time into their events, and wakes parked calls when something
changed. It ends by itself once the state of the run is final. What an actor of an older incarnation says is
refused.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from itertools import islice
from typing import Any

from asyncrl.controller.run_state import RunStateMachine
from asyncrl.errors import Refused
from asyncrl.messages import (
    ActorEnded,
    ActorRecord,
    Done,
    Heartbeat,
    MetricsLine,
    Register,
    ReportFailure,
    Resolve,
    Resolved,
    RunFinished,
    RunState,
    StopRun,
    WatchRun,
)
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.runtime.parking import ParkingLot
from asyncrl.runtime.registry import Registry

ADDRESS_FILE = "controller.json"
"""In the run's private folder: ``{"address": ..., "incarnation": ...}``."""
LINES_KEPT = 1000
LINES_IN_REPLY = 100
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
        )
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self._last_line = 0
        self._changed = asyncio.Event()
        self._watchers = ParkingLot()
        self._registered = ParkingLot()

    async def setup(self) -> None:
        """Leave the address where the agent looks for it."""
        path = self.context.run_dir / "private" / ADDRESS_FILE
        text = json.dumps({"address": self.address, "incarnation": self.context.incarnation})
        await asyncio.to_thread(_write_atomically, str(path), text)

    async def run(self) -> None:
        """Let time act on the run until its state is final."""
        self.tasks.create_task(self._watch_heartbeats())
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
            stalled = self._registry.silent(now, supervision.silence_s)
            if self._run.silent(stalled, now):
                self.log.error("actors are frozen", actors={actor.name: actor.reason for actor in stalled})
                self._tell()

    # --- registry ---

    @handler
    def register(self, request: Register, caller: Caller) -> Done:
        """Take in an actor's record. Raises Refused for one of an older incarnation."""
        if (request.record.name, request.record.incarnation) != (caller.name, caller.incarnation):
            raise Refused(self.name, "name", ours=caller.name, theirs=request.record.name)
        self._registry.register(request.record, self.clock.now())
        self._registered.wake()
        self._run.started(request.record.name)
        self._run.ready(self._registry.ready(), self.clock.now())
        self.log.info("registered", actor=request.record.name, address=request.record.address)
        self._tell()
        return Done()

    @handler
    def heartbeat_of(self, request: Heartbeat, caller: Caller) -> None:
        """Note a heartbeat. Its absence is a stall: its process is killed before anybody counts it as dead."""
        if not self._registry.heartbeat(caller.name, caller.incarnation, request, self.clock.now()):
            self.counters["heartbeats/ignored"] = self.counters.get("heartbeats/ignored", 0) + 1

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

        return await self._watchers.until(news, caller.park_s) or self._state(request.seen_line)

    @handler
    def metrics_line(self, request: MetricsLine, caller: Caller) -> None:
        """Keep a line for whoever watches; the oldest goes when there are too many."""
        self._lines.append(request.line)
        self._last_line += 1
        self._watchers.wake()

    @handler
    def stop_run(self, request: StopRun, caller: Caller) -> Done:
        """End the run in good order."""
        if self._run.stop(request.reason, self.clock.now()):
            self.log.info("run is stopped", by=caller.name, reason=request.reason)
            self._tell()
        return Done()

    @handler
    def run_finished(self, request: RunFinished, caller: Caller) -> Done:
        """All is trained and written."""
        if self._run.finish(self.clock.now()):
            self.log.info("run is finished", by=caller.name)
            self._tell()
        return Done()

    @handler
    def actor_ended(self, request: ActorEnded, caller: Caller) -> Done:
        """A process has ended."""
        now = self.clock.now()
        self.log.info("actor ended", actor=request.name, exit_code=request.exit_code, fatal=request.fatal)
        if self._registry.ended(request.name, request.incarnation, now):
            self._run.ended(request.name, request.exit_code, request.fatal, request.reason, request.log, now)
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

    # --- waiting ---

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
        )

    def _tell(self) -> None:
        self._changed.set()
        self._watchers.wake()


def _write_atomically(path: str, text: str) -> None:
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


ACTOR = Controller

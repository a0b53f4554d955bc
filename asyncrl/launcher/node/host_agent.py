"""Runs a node agent: follows the controller and the launcher, and carries out what ``AgentState`` decides.

Exits, states of the run, commands, signals and time become events of ``AgentState``. For each event it returns
instructions, and this module carries them out before the next event. Actors are spawned from the main thread. A signal
preempts the run, and a second one kills it; SIGHUP counts as the first only. Only the head's agent starts the
controller. It reports the controller's address to the launcher, which passes it to the other agents. At the end it
writes the record of how the run ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError
from asyncrl.core.roles import ROLES, role_of
from asyncrl.launcher.common.agent_messages import (
    ARRIVED,
    AT_ONCE,
    CONTROLLER_AT,
    KILL,
    PREEMPT,
    STOP,
    AgentSpec,
    ControllerEvent,
    MetricsEvent,
    NoticeEvent,
    ReadyEvent,
    RestartEvent,
    StateEvent,
    agent_name,
    private_name,
)
from asyncrl.launcher.common.signals import STOPPING, cause_of
from asyncrl.launcher.node.agent_link import AgentLink, make_link
from asyncrl.launcher.node.agent_state import AgentState, Instruction, Kill, KillAll, Spawn
from asyncrl.launcher.node.child import Child, environment_of
from asyncrl.launcher.node.launcher_link import LauncherLink
from asyncrl.launcher.node.stuck_actors import StuckActors
from asyncrl.launcher.run_folder.ended import write_ended
from asyncrl.launcher.run_folder.private import PART, remove_part
from asyncrl.messages.actors import NOTICE, READY, ActorEnded, ActorStarted, EndNoted, RunState, StopRun
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.controller_client import ADDRESS_FILE, read_address_file
from asyncrl.rpc.lifecycle.incarnations import Incarnations
from asyncrl.rpc.process import live

LOOK_FOR_CONTROLLER_S = 0.02
STACKS_S = 5.0
"""Seconds that an actor has to write its stacks, in addition to four heartbeats."""
FAREWELL_S = 2.0
"""Seconds for each of the last steps: stacks, a failed host's farewell, logs, events, and the wait for ARRIVED."""
ASK_STOP_S = 2.0
"""Seconds for the controller to confirm a request to stop the run; after them everything is killed."""


class HostAgent:
    """The node agent of one host."""

    def __init__(self, spec: AgentSpec, config: Config, output: asyncio.StreamWriter) -> None:
        """``spec`` names the actors of this host; events for the launcher go to ``output``."""
        self._spec = spec
        self._config = config
        self._run_dir = Path(spec.run_dir)
        self._launcher = LauncherLink(output, Path(spec.log_dir))
        # The guard is the process above this one. When it has ended, this process ends its actors.
        self._guard = os.getppid()
        logs = {name: f"{spec.log_dir}/{name.replace('/', '-')}.log" for name in spec.actors}
        self._state = AgentState(logs, config.supervision, config.preempt.grace_s)
        self._incarnations = Incarnations(spec.above)
        self._children: dict[str, Child] = {}
        self._starts: dict[str, int] = {}
        """Number of times that each actor was started; roles whose incarnation is fixed are not counted."""
        self._address = ""
        """Address of the controller; empty until it is known."""
        self._address_sent = asyncio.Event()
        self._has_own_folder = (self._run_dir / PART).exists()
        """Whether the run folder is this host's alone, so that its logs are sent to the launcher."""
        self._link: AgentLink | None = None
        """Connection to the controller; None until its address is known."""
        self._event_came = asyncio.Event()
        """Set after each event, so that the main loop checks whether the host is finished."""
        self._first_signal = 0
        """The first signal, or the first after a SIGHUP; 0 for none."""
        own = agent_name(spec.index)
        self._log = get_logger(own)
        self._tasks: asyncio.TaskGroup
        log, patience_s = f"{spec.log_dir}/agent-{spec.index}.log", STACKS_S + 4 * config.supervision.heartbeat_s
        self._stuck = StuckActors(own, log, patience_s, self._launcher.emit, lambda work: self._tasks.create_task(work))

    async def main(self, commands: asyncio.StreamReader) -> int:
        """Run this host's part to its end, obeying the launcher's ``commands``; returns the run's exit code."""
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._on_signal, number)
        # The guard has spawned this process with these signals blocked, until the handlers are installed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._read_commands(commands))
                self._tasks.create_task(self._find_controller())
                self._tasks.create_task(self._launcher.beat(self._config.supervision.heartbeat_s))
                if self._has_own_folder:
                    self._tasks.create_task(self._launcher.send_logs())
                self._carry_out(self._state.begin())
                while not self._state.finished:
                    await self._wait_for_event()
                    self._event_came.clear()
                    self._carry_out(self._state.tick(time.monotonic()))
                # The actors' processes are gone, so stacks that are not taken by now will not come.
                await self._stuck.wait(FAREWELL_S)
                if self._link is not None and not self._state.is_head and self._owes_farewell():
                    await self._say_farewell(self._link)
                raise _Finished
        except* _Finished:
            pass
        if self._has_own_folder:
            await self._launcher.send_last_logs(FAREWELL_S)
        return self._say_how_it_ended()

    def _owes_farewell(self) -> bool:
        """Whether the controller must hear that this host has ended: it knows the host, and the run may continue."""
        return not self._state.unreached and (self._state.leaving or self._state.failure is not None)

    async def _say_farewell(self, link: AgentLink) -> None:
        """Report to the controller that all has ended here.

        A host that failed has FAREWELL_S for this. A host that leaves tries for ``host_grace_s``, so that a restarted
        controller hears it too, or until the run ends.
        """
        state = self._state
        if state.failure is not None:
            await link.say_farewell(FAREWELL_S)
            return
        saying = self._tasks.create_task(link.say_farewell(self._config.supervision.host_grace_s))
        saying.add_done_callback(lambda _: self._event_came.set())
        while not saying.done() and not state.ending:
            await self._event_came.wait()
            self._event_came.clear()

    # --- events ---

    async def _wait_for_event(self) -> None:
        deadline = self._state.next_deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._event_came.wait()

    def _handle(self, event: Callable[..., list[Instruction]], *arguments: Any) -> None:
        """Pass an event to ``AgentState``, carry out what it returns, and wake the main loop for the next deadline."""
        self._carry_out(event(*arguments, time.monotonic()))
        self._event_came.set()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """Carry out instructions in order. An actor that cannot be spawned counts as one that exited with code 1.

        Reports to the controller are left out until its address is known.
        """
        unstarted: list[tuple[str, OSError]] = []
        for instruction in instructions:
            match instruction:
                case Spawn(name):
                    try:
                        self._spawn(name)
                    except OSError as error:
                        unstarted.append((name, error))
                case RestartEvent():
                    self._launcher.emit(instruction)
                # An actor that could not be spawned just now has no child.
                case Kill(name, reason) if name in self._children:
                    if name == CONTROLLER:
                        # The controller cannot report itself as stuck.
                        self._stuck.show(self._children[name], f"{name} holds up the run: {reason}")
                    self._stuck.kill(self._children[name], reason)
                case KillAll():
                    for child in self._children.values():
                        child.kill()
                case StopRun():
                    self._tasks.create_task(self._ask_stop(instruction))
                case ActorStarted() | ActorEnded() if self._link is not None:
                    self._tasks.create_task(self._report(self._link, instruction))
        # Each failed start is an event of its own, after the instructions above.
        for name, failure in unstarted:
            # The error names the program even if the cause is a log that cannot be written.
            why = f"it cannot be started with its log in {self._spec.log_dir}: {failure.strerror}"
            self._log.error("not started", actor=name, reason=why)
            self._carry_out(self._state.exited(name, 1, why, time.monotonic()))

    def _on_signal(self, number: signal.Signals) -> None:
        """Preempt the run at the first signal and kill it at the second; a SIGHUP never leads to a kill."""
        self._log.info("signal", number=number.name)
        # The death of the guard comes as SIGTERM (die_with_parent), and leaves this process with another parent.
        if os.getppid() != self._guard:
            self._handle(self._state.guard_lost)
        elif not self._first_signal:
            self._handle(self._state.preempt, cause_of(number))
        elif signal.SIGHUP not in (self._first_signal, number):
            self._handle(self._state.kill, f"ended at once by {number.name} to the agent")
        if self._first_signal in (0, signal.SIGHUP):
            self._first_signal = number

    async def _read_commands(self, commands: asyncio.StreamReader) -> None:
        """Turn the launcher's commands into events, until the launcher is gone."""
        while line := await commands.readline():
            self._log.info("command", line=line.decode(errors="replace").strip())
            if line == STOP:
                self._handle(self._state.stop, "stopped by the launcher")
            elif line.startswith(PREEMPT):
                self._handle(self._state.preempt, line.removeprefix(PREEMPT).decode().strip())
            elif line == KILL:
                self._handle(self._state.kill, AT_ONCE)
            elif line.startswith(CONTROLLER_AT):
                self._address = line.removeprefix(CONTROLLER_AT).decode().strip()
                self._address_sent.set()
            else:
                self._log.warning("unknown command", line=line.decode(errors="replace"))
        self._log.warning("launcher is gone")
        self._state.launcher_gone()
        self._event_came.set()

    async def _find_controller(self) -> None:
        """Wait for the controller's address, at most ``start_timeout_s``, then follow the controller."""
        try:
            async with asyncio.timeout(self._config.supervision.start_timeout_s):
                await self._learn_address()
        except TimeoutError:
            reason = f"no address after {self._config.supervision.start_timeout_s:g} s"
            self._handle(self._state.controller_lost, reason)
            return
        self._link = make_link(
            self._spec,
            self._config,
            self._address,
            self._incarnations.next(agent_name(self._spec.index)),
            on_state=self._on_state,
            on_silent=lambda: self._handle(self._state.controller_silent),
            on_successor=lambda: self._handle(self._state.controller_found),
        )
        self._tasks.create_task(self._follow(self._link))
        self._state.controller_at(time.monotonic())
        self._event_came.set()

    async def _learn_address(self) -> None:
        """Set ``_address``: the head reads it from the controller's file, other hosts get it from the launcher."""
        if not self._state.is_head:
            await self._address_sent.wait()
            return
        path = self._run_dir / private_name(self._spec.index) / ADDRESS_FILE
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_FOR_CONTROLLER_S)
        record = read_address_file(path)
        assert record is not None, f"{path} is replaced, and never removed"
        self._address = record.address
        self._launcher.emit(ControllerEvent(address=self._address))

    async def _follow(self, link: AgentLink) -> None:
        """Run the link to the controller, with heartbeats and measurements of this process, until it fails."""
        try:
            await live(link, self._address)
        except AsyncRLError as error:
            self._handle(self._state.controller_lost, str(error))

    def _on_state(self, state: RunState) -> None:
        assert self._link is not None
        event = StateEvent(
            phase=state.phase,
            waiting_for=state.waiting_for,
            waits=state.waits,
            lost_hosts=state.lost_hosts,
            leaving=[leaving.name for leaving in state.leaving],
            controller=self._link.controller,
        )
        self._launcher.emit(event)
        for line in state.lines:
            self._launcher.emit(_event_of(line))
        # Take the stacks of stuck actors first: ``AgentState`` may kill them below.
        self._stuck.take_stacks_of(state.stuck, self._children)
        # Also first: an actor that ``AgentState`` starts must get an incarnation above the dead ones.
        self._incarnations.stay_above(state.dead, state.generations)
        own = agent_name(self._spec.index)
        for leaving in state.leaving:
            if leaving.name == own:
                self._handle(self._state.leave, leaving.within_s)
        self._handle(self._state.state, state)

    # --- instructions ---

    def _spawn(self, name: str) -> None:
        """Start the process of an actor under its next incarnation. Raises OSError."""
        incarnation = self._incarnations.next(name)
        # Even if the process cannot be started, its end is reported under this incarnation.
        instructions = self._state.spawned(name, incarnation)
        argv = [*self._spec.argv, name, "--run", self._spec.run_dir, "--incarnation", str(incarnation)]
        if self._spec.host:
            argv += ["--host", self._spec.host, "--private", private_name(self._spec.index)]
        if ROLES[role_of(name)].fixed:
            # Such an actor always uses the keys of its first start, because its peers know its address, but no attempt.
            argv += ["--attempt", "0"]
            if self._address:
                # A restarted controller binds to the first one's address, because the others know no other.
                argv += ["--address", self._address]
        else:
            attempt = self._starts.get(name, 0)
            self._starts[name] = attempt + 1
            # Later starts use the last key pair.
            key_pair = min(attempt, self._config.supervision.max_restarts)
            argv += ["--attempt", str(key_pair), "--controller", self._address]
        log = Path(self._state.logs[name])
        child = Child.spawn(name, incarnation, argv, environment_of(os.environ, self._spec.actors[name]), log)
        self._children[name] = child
        self._carry_out(instructions)
        self._log.info("spawned", actor=name, pid=child.pid, incarnation=incarnation)
        self._tasks.create_task(self._wait_for_end(child))

    async def _wait_for_end(self, child: Child) -> None:
        """Wait until a child and its leftovers have ended, and report that to ``AgentState``."""
        exit_code = await child.wait({other.pid for other in self._children.values() if other is not child})
        del self._children[child.name]
        if child.stuck:
            self._log.error("killed but not ended", actor=child.name, pids=child.stuck)
        hint = child.last_words() if exit_code > 0 else ""
        self._log.info("ended", actor=child.name, pid=child.pid, exit_code=exit_code, hint=hint)
        self._handle(self._state.exited, child.name, exit_code, hint)

    async def _report(self, link: AgentLink, message: ActorStarted | ActorEnded) -> None:
        """Send a report. If it is on an end, pass to ``AgentState`` whether the controller had asked for the end."""
        reply = await link.report(message)
        if isinstance(reply, EndNoted):
            self._handle(self._state.end_noted, message.name, message.incarnation, reply.asked)

    async def _ask_stop(self, request: StopRun) -> None:
        """Ask the controller to stop or preempt the run. If it does not answer on a stop, kill everything."""
        timeout = None if request.preempt else ASK_STOP_S
        asked = self._link is not None and await self._link.report(request, timeout) is not None
        if not asked and not request.preempt:
            self._handle(self._state.kill, request.reason)

    # --- the end ---

    async def remove_part_once_logs_arrived(self, commands: asyncio.StreamReader) -> None:
        """Remove this host's part of the run folder once the launcher has sent ARRIVED, because it has all logs.

        Waits for ARRIVED at most FAREWELL_S. Keeps the folder if the host has joined again meanwhile: its new agent,
        with a larger index, uses the same folder.
        """
        # A private folder is named private-INDEX.
        indexes = [int(path.name.split("-")[1]) for path in self._run_dir.glob("private-*")]
        if self._has_own_folder and max(indexes, default=0) <= self._spec.index:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    while line := await commands.readline():
                        if line == ARRIVED:
                            remove_part(self._run_dir)
                            return

    def _say_how_it_ended(self) -> int:
        """Send the last event; on the head also write the record of the run's end. Returns the exit code."""
        own = agent_name(self._spec.index)
        ended = self._state.how_it_ended(own, f"{self._spec.log_dir}/agent-{self._spec.index}.log")
        if self._state.is_head:
            try:
                write_ended(self._run_dir, self._spec.log_dir, ended)
            except OSError as error:
                self._log.warning("how the run ended is not kept", error=str(error), result=ended.result)
        self._launcher.emit(ended)
        return ended.exit_code


def _event_of(line: dict[str, Any]) -> MetricsEvent | NoticeEvent | ReadyEvent:
    """Make the event for one of ``RunState.lines``."""
    if line.get("kind") == READY:
        return ReadyEvent(name=line["actor"])
    if line.get("kind") == NOTICE:
        return msgspec.convert(line, NoticeEvent)
    return MetricsEvent(line=line)


class _Finished(Exception):
    """Leaves the task group, which cancels what still runs in it."""

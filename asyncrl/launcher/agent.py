"""The node agent: spawns the actors of one host, watches them, restarts them, ends them.

    python -m asyncrl.launcher.agent GUARD_PID

It reads its spec and then commands from standard input and writes events to standard output (see ``spec``).
``host`` decides; this shell spawns from the main thread, turns exits, states, commands and time into
events, and carries out what ``host`` answers, one event at a time. SIGTERM and SIGINT mean the same as
``stop``. The agent is a subreaper: whatever an actor leaves behind becomes its child and is ended with it,
and at the end it has no child left. If the agent itself dies, its guard ends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from asyncrl.config import Config, config_from_json
from asyncrl.errors import AsyncRLError
from asyncrl.launcher.child import Child
from asyncrl.launcher.host import Announce, AskStop, Host, Instruction, Kill, KillAll, Report, Spawn
from asyncrl.launcher.link import ControllerLink, make_link
from asyncrl.launcher.processes import become_subreaper, die_with_parent, end_children
from asyncrl.launcher.spec import (
    KILL,
    STOP,
    ActorSpec,
    AgentSpec,
    EndedEvent,
    Event,
    MetricsEvent,
    RestartEvent,
    StateEvent,
)
from asyncrl.messages import ActorEnded, RunState
from asyncrl.monitor.logging import configure_logging, get_logger
from asyncrl.runtime.endpoint import new_incarnation
from asyncrl.runtime.supervision import STOPPED_EXIT_CODE

LOOK_FOR_CONTROLLER_S = 0.02
UNREAD_BYTES = 1 << 20
"""With more than this unread by the launcher, it is told of no more metrics; their file has them all."""
SPEC_BYTES = 16 << 20
END_S = 5.0
FAREWELL_S = 2.0


class Agent:
    """See the module."""

    def __init__(self, spec: AgentSpec, config: Config, output: asyncio.StreamWriter) -> None:
        self._spec = spec
        self._config = config
        self._run_dir = Path(spec.run_dir)
        self._output = output
        self._guard = os.getppid()
        self._actors = {actor.name: actor for actor in spec.actors}
        logs = {name: f"{spec.log_dir}/{name.replace('/', '-')}.log" for name in self._actors}
        self._host = Host(logs, config.supervision)
        self._children: dict[str, Child] = {}
        self._starts: dict[str, int] = {}
        self._address = ""
        self._link: ControllerLink | None = None
        self._news = asyncio.Event()
        self._log = get_logger("agent/0")
        self._tasks: asyncio.TaskGroup

    async def main(self, commands: asyncio.StreamReader) -> int:
        """Run this host's part to its end; the exit code is the run's."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._read_commands(commands))
                self._tasks.create_task(self._find_controller())
                self._do(self._host.begin())
                while not self._host.finished:
                    await self._wait_for_news()
                    self._news.clear()
                    self._carry_out(self._host.tick(time.monotonic()))
                raise _Finished
        except* _Finished:
            pass
        return self._say_how_it_ended()

    # --- events ---

    async def _wait_for_news(self) -> None:
        deadline = self._host.next_deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._news.wait()

    def _do(self, instructions: list[Instruction]) -> None:
        """Carry out the answer to an event; what is next to wait for may have changed."""
        self._carry_out(instructions)
        self._news.set()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Spawn(name):
                    self._spawn(self._actors[name])
                case Report(name, exit_code, fatal, reason):
                    self._report(name, exit_code, fatal, reason)
                case Announce(name, reason):
                    self._emit(RestartEvent(name=name, reason=reason))
                case Kill(name):
                    self._log.warning("frozen actor is killed", actor=name, pid=self._children[name].pid)
                    self._children[name].kill()
                case AskStop(reason):
                    self._tasks.create_task(self._ask_stop(reason))
                case KillAll():
                    for child in self._children.values():
                        child.kill()

    def _on_signal(self, number: signal.Signals) -> None:
        guarded = os.getppid() == self._guard
        self._stop(f"the agent was stopped by {number.name}" if guarded else "the agent lost its guard")

    def _stop(self, reason: str) -> None:
        self._log.info("stop", reason=reason)
        self._do(self._host.stop(reason, time.monotonic()))

    async def _read_commands(self, commands: asyncio.StreamReader) -> None:
        while line := await commands.readline():
            if line == STOP:
                self._stop("stopped by the launcher")
            elif line == KILL:
                self._do(self._host.kill("ended at once by the launcher", time.monotonic()))
            else:
                self._log.warning("unknown command", line=line.decode(errors="replace"))
        self._log.warning("launcher is gone")
        self._host.launcher_gone()
        self._news.set()

    async def _find_controller(self) -> None:
        path = self._run_dir / "private" / "controller.json"
        until = time.monotonic() + self._config.supervision.start_timeout_s
        while not path.exists():
            if time.monotonic() >= until:
                reason = f"no address after {self._config.supervision.start_timeout_s:g} s"
                self._do(self._host.controller_lost(reason, time.monotonic()))
                return
            await asyncio.sleep(LOOK_FOR_CONTROLLER_S)
        self._address = json.loads(path.read_text())["address"]
        self._link = make_link(self._config, self._run_dir, self._address, self._on_state)
        self._tasks.create_task(self._follow(self._link))
        self._do(self._host.controller_found(time.monotonic()))

    async def _follow(self, link: ControllerLink) -> None:
        try:
            await link.main()
        except AsyncRLError as error:
            self._do(self._host.controller_lost(str(error), time.monotonic()))

    def _on_state(self, state: RunState) -> None:
        self._emit(StateEvent(phase=state.phase, waiting_for=state.waiting_for))
        for line in state.lines:
            self._emit(MetricsEvent(line=line))
        self._do(self._host.state(state, time.monotonic()))

    # --- instructions ---

    def _spawn(self, actor: ActorSpec) -> None:
        name = actor.name
        attempt = self._starts.get(name, 0)
        self._starts[name] = attempt + 1
        incarnation = new_incarnation()
        argv = [*actor.argv, name, "--run", self._spec.run_dir, "--incarnation", str(incarnation)]
        argv += ["--attempt", str(min(attempt, self._spec.attempts - 1))]
        if self._address:
            argv += ["--controller", self._address]
        log = Path(self._host.logs[name])
        child = Child.spawn(name, incarnation, argv, {**os.environ, **actor.env}, log)
        self._children[name] = child
        self._host.spawned(name, incarnation)
        self._log.info("spawned", actor=name, pid=child.pid, incarnation=incarnation)
        self._tasks.create_task(self._wait(child))

    async def _wait(self, child: Child) -> None:
        exit_code = await child.wait({other.pid for other in self._children.values() if other is not child})
        del self._children[child.name]
        if child.stuck:
            self._log.error("killed but not ended", actor=child.name, pids=child.stuck)
        hint = child.last_words() if exit_code > 0 else ""
        self._log.info("ended", actor=child.name, pid=child.pid, exit_code=exit_code, hint=hint)
        self._do(self._host.exited(child.name, exit_code, hint, time.monotonic()))

    def _report(self, name: str, exit_code: int, fatal: bool, reason: str) -> None:
        if self._link is not None:
            message = ActorEnded(
                name=name,
                incarnation=self._host.incarnations[name],
                exit_code=exit_code,
                fatal=fatal,
                reason=reason,
                log=self._host.logs[name],
            )
            self._tasks.create_task(self._link.report(message))

    async def _ask_stop(self, reason: str) -> None:
        if self._link is None or not await self._link.ask_stop(reason):
            self._do(self._host.unreachable(time.monotonic()))

    # --- what is said ---

    def _emit(self, event: Event) -> None:
        unread = self._output.transport.get_write_buffer_size()
        if not self._output.is_closing() and (unread < UNREAD_BYTES or not isinstance(event, MetricsEvent)):
            self._output.write(msgspec.json.encode(event) + b"\n")

    def _say_how_it_ended(self) -> int:
        host = self._host
        if host.failure is not None:
            failed = host.failure
            event = EndedEvent(
                result="failed",
                actor=failed.actor,
                reason=failed.reason,
                log=failed.log or "",
                exit_code=failed.exit_code,
            )
        elif host.finished_run:
            event = EndedEvent(result="done")
        else:
            event = EndedEvent(result="stopped", reason=host.stopped, exit_code=STOPPED_EXIT_CODE)
        self._emit(event)
        return event.exit_code


class _Finished(Exception):
    """Leaves the task group, which cancels what still runs in it."""


def _read_config(run_dir: str) -> Config:
    return config_from_json(Path(run_dir, "config.json").read_text())


async def _live() -> int:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=SPEC_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    output = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        spec = msgspec.json.decode(await commands.readline(), type=AgentSpec)
        config = _read_config(spec.run_dir)
        configure_logging(config.log.level)
        return await Agent(spec, config, output).main(commands)
    finally:
        # With a limit of 0, drain returns when everything has left.
        transport.set_write_buffer_limits(0)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                await output.drain()
        output.close()


def main() -> int:
    """Live as the agent, then end every process that is left below it."""
    guard = int(sys.argv[1])
    become_subreaper()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != guard:
        return 1
    try:
        return asyncio.run(_live())
    finally:
        if stuck := end_children(END_S):
            sys.stderr.write(f"agent: processes {stuck} were killed but do not end\n")


if __name__ == "__main__":
    sys.exit(main())

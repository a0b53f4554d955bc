"""A run on this host: makes its folder, starts the guard and through it the agent, follows it to the end.

Ctrl-C and a closed terminal end the run in good order; SIGTERM and SIGUSR2 let it make way, which is to write a
checkpoint first; a second signal ends it at once. Whatever hangs, the end comes: an agent that does not end its actors
within ``drain_s`` is told to kill them, one that does not even do that is killed, and then its guard ends the rest.
When this function returns, no process of the run is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import ActorFailed
from asyncrl.launcher.folders import RunFolder, create_run_folder, private_folder, remove_abandoned
from asyncrl.launcher.placement import Placed
from asyncrl.launcher.processes import children_of
from asyncrl.launcher.progress import Progress, read_metrics, summarise
from asyncrl.launcher.resume import AUTO, Resumption
from asyncrl.launcher.spec import KILL, PREEMPT, STOP, ActorSpec, AgentSpec, EndedEvent, Event, StateEvent
from asyncrl.runtime.supervision import describe_exit

ACTOR_ARGV = (sys.executable, "-m", "asyncrl.cli.actor")
GUARD_ARGV = (sys.executable, "-m", "asyncrl.launcher.guard")
PREEMPTING = (signal.SIGTERM, signal.SIGUSR2)
STOPPING = (signal.SIGINT, signal.SIGHUP, *PREEMPTING)
SLACK_S = 1.5
"""How much longer than ``drain_s`` the agent has before it is told to kill, and then before it is killed."""
LONGEST_EVENT_BYTES = 64 << 20


def run_local(
    config: Config,
    placed: list[Placed],
    actor_argv: tuple[str, ...] = ACTOR_ARGV,
    *,
    resumption: Resumption | None = None,
) -> int:
    """Run to the end and show it; the exit code. Raises UsageError if the run to be resumed lives."""
    progress = Progress(sys.stdout, config.learner.steps)
    for path in remove_abandoned(Path(config.run.dir).absolute()):
        progress.say(f"removed {path}, left behind by a run that was killed")
    folder = resumption.folder if resumption is not None else create_run_folder(config)
    with private_folder(folder, config) as lock:
        if resumption is None:
            progress.say(f"run folder: {folder.path}")
        else:
            for path in resumption.begin(config):
                progress.say(f"set aside as {path}")
            progress.say(resumption.describe())
        ended = asyncio.run(_Follower(config, folder, placed, actor_argv, lock, progress).main())
    progress.end()
    lines = read_metrics(folder.path / "metrics.jsonl")
    for row in summarise(lines, folder.path, folder.logs, config.learner.steps):
        progress.say(row)
    if ended.result == "failed":
        first, _, rest = ended.reason.partition("\n")
        for row in rest.splitlines():
            progress.say(row)
        progress.say(str(ActorFailed(ended.actor, first, log=ended.log)))
    elif ended.result == "stopped":
        progress.say(f"ended before the last step: {ended.reason}")
    elif ended.result == "preempted":
        place = AUTO if folder.path.name == config.run.name else str(folder.path)
        progress.say(f"{ended.reason}; the same command with --resume {place} goes on")
    return ended.exit_code


@dataclass
class _Follower:
    config: Config
    folder: RunFolder
    placed: list[Placed]
    actor_argv: tuple[str, ...]
    lock: int
    progress: Progress
    signal: int = 0
    """The first one that asked for the end."""
    phase: str = ""
    """Of the run, as last heard of."""
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    async def main(self) -> EndedEvent:
        """Start the agent below its guard, show its events, return the last."""
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._interrupt, number)
        log = self.folder.logs / "agent-0.log"
        with log.open("ab") as errors:
            guard = await asyncio.create_subprocess_exec(
                *GUARD_ARGV,
                str(self.folder.private),
                str(self.lock),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=(self.lock,),
                limit=LONGEST_EVENT_BYTES,
            )
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.write(msgspec.json.encode(self._spec()) + b"\n")
        ending = asyncio.create_task(self._end(guard))
        try:
            ended = await self._follow(guard.stdout)
            exit_code = await guard.wait()
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
            if guard.returncode is None:
                self._send(guard, KILL)
                await guard.wait()
        if ended is None:
            reason = describe_exit(exit_code if exit_code < 128 else 128 - exit_code)
            ended = EndedEvent(result="failed", actor="agent/0", reason=reason, log=str(log), exit_code=1)
        if ended.result == "stopped" and self.signal:
            reason = "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name
            if ended.reason.startswith("preempted"):
                reason = f"{reason}: {ended.reason}"
            ended = msgspec.structs.replace(ended, reason=reason, exit_code=128 + self.signal)
        return ended

    async def _follow(self, events: asyncio.StreamReader) -> EndedEvent | None:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
        last: EndedEvent | None = None
        while line := await events.readline():
            event = decoder.decode(line)
            if isinstance(event, EndedEvent):
                last = event
            elif isinstance(event, StateEvent):
                self.phase = event.phase
            self.progress.show(event)
        return last

    async def _end(self, guard: asyncio.subprocess.Process) -> None:
        """Carry out what the user asks for by signals, each step with the next one's deadline."""
        await self._interrupted.wait()
        patience = self.config.supervision.drain_s + SLACK_S
        if self.signal in PREEMPTING and self.phase == "running":
            grace = self.config.preempt.grace_s
            self.progress.say(f"making way: a checkpoint is written, within {grace:g} s; again to end at once")
            self._send(guard, PREEMPT)
            # The controller, and for want of it the agent, have the same time from when they hear of it.
            patience += grace + self.config.supervision.drain_s
        else:
            self.progress.say("ending in good order; again to end at once")
            self._send(guard, STOP)
        await self._next_interrupt(patience)
        self.progress.say("ending at once")
        self._send(guard, KILL)
        await self._next_interrupt(SLACK_S)
        for agent in children_of(guard.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)

    async def _next_interrupt(self, timeout: float) -> None:
        self._interrupted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._interrupted.wait()

    def _interrupt(self, number: int) -> None:
        self.signal = self.signal or number
        self._interrupted.set()

    def _send(self, guard: asyncio.subprocess.Process, command: bytes) -> None:
        assert guard.stdin is not None
        if not guard.stdin.is_closing():
            guard.stdin.write(command)

    def _spec(self) -> AgentSpec:
        return AgentSpec(
            run_dir=str(self.folder.path),
            log_dir=str(self.folder.logs),
            attempts=self.config.supervision.max_restarts + 1,
            actors=[
                ActorSpec(name=placed.name, argv=list(self.actor_argv), env=dict(placed.env)) for placed in self.placed
            ],
        )

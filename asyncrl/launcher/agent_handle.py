"""A living agent as its follower has it: its events, the commands to it, and how it ends.

An agent is asked to end, then to kill its actors, and then its connection is cut, each step with a deadline. Its log
lines are appended to those of the run, and all other lines of a connection are shown.

``watch_silence`` reports an agent that is silent, and when it is heard again. A frozen agent is killed by its guard
after ``supervision.silence_s``. If nothing ends for much longer, the guard is frozen as well: the connection is cut. On
another host this is a lost connection, on this one the death of the agent. Time in which this process was stopped
itself does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.launcher.common.agent_messages import (
    ARRIVED,
    KILL,
    STOP,
    BeatEvent,
    EndedEvent,
    Event,
    LogEvent,
    agent_name,
)
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.node.agent_heartbeat import Silence
from asyncrl.launcher.terminal.interrupts import Interrupts
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.rpc.lifecycle.registry import FIRST_WORD_S
from asyncrl.rpc.lifecycle.supervision import describe_exit

LOOK_S = 0.5
"""Time between two looks at an agent."""
REPORT_SHARE = 0.5
"""Silence of an agent that is reported, as a share of supervision.silence_s."""
PARTING_S = 20.0
"""Time in which a guard ends what its agent has left; it gives up after half of it."""
SLACK_S = 1.5
"""Time beyond ``drain_s`` that an agent has before it is to kill its actors, and then before it is killed."""


@dataclass(eq=False)
class AgentHandle:
    """A host of the run with its living agent."""

    index: int
    contact: Contact
    ended: EndedEvent | None = None
    """The last event; None before it has come."""
    exit_code: int | None = None
    lost: bool = False
    """Whether its connection ended, and its own end is unknown."""
    silence: Silence = field(default_factory=lambda: Silence(LOOK_S))
    _heard: bool = False
    """Whether anything came since the last look."""
    _spoken: bool = False
    """Whether anything has ever come."""
    _reported: bool = False
    """Whether its silence was reported."""
    _cuts: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.exit_code is not None

    @property
    def host(self) -> str:
        """Name of the host; empty in a run on one host."""
        return self.contact.name

    @property
    def name(self) -> str:
        """Name of the agent, with its host where there are several."""
        return agent_name(self.index) + (f" on {self.host}" if self.host else "")

    @property
    def log(self) -> str:
        """The name of the agent's own log."""
        return f"agent-{self.index}.log"

    @property
    def exit_words(self) -> str:
        """Words for the end of its process."""
        assert self.exit_code is not None
        # The guard reports the signal that killed its agent as 128 and the signal's number.
        words = describe_exit(self.exit_code if self.exit_code < 128 else 128 - self.exit_code)
        return (
            f"frozen, without a sign of life for {self.silence.seconds:.0f} s, then {words}"
            if self._reported
            else words
        )

    @property
    def loss_words(self) -> str:
        """Words for the loss of its connection, with the reason where it is known."""
        why = f" ({self.contact.last_error})" if self.contact.last_error else ""
        if self._cuts:
            why = f" (no sign of life for {self.silence.seconds:.0f} s)"
        return f"{self.host}: the connection is lost{why}"

    def send(self, command: bytes) -> None:
        """Send a command; lost if its standard input is not there any more."""
        if not self.over:
            self.contact.send(command)

    async def hear(self, logs: Path, progress: TerminalProgress, take: Callable[[Any], None]) -> None:
        """Read until nothing more comes, every event that is no log given to ``take``; then it is known how it ended.

        Its log lines are appended to the files in ``logs``.
        """
        output = self.contact.process.stdout
        assert output is not None
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
        while line := await output.readline():
            self._heard = True
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:
                # Not the agent's: other things write to a connection too.
                progress.warn([f"{self.name}: {line.decode(errors='replace').strip()}"])
                continue
            if isinstance(event, BeatEvent):
                continue
            if isinstance(event, LogEvent):
                _append(logs, event)
                continue
            if isinstance(event, EndedEvent):
                self.ended = event
                self.send(ARRIVED)
            take(event)
        code = await self.contact.exited()
        self.lost = self.contact.is_lost(code) and self.ended is None
        self.exit_code = code

    def look(self, config: Config, progress: TerminalProgress) -> None:
        """Look, every LOOK_S, whether anything has come; report a silence, and cut a connection that stays silent."""
        if self.over:
            return
        supervision = config.supervision
        limit_s = supervision.agent_silence_s
        silent_s, reported = self.silence.look(heard=self._heard), self._reported
        if self._heard and reported:
            progress.say(f"{self.name} is heard again")
        self._spoken |= self._heard
        report_s = REPORT_SHARE * limit_s if self._spoken else max(REPORT_SHARE * limit_s, FIRST_WORD_S)
        self._heard, self._reported = False, silent_s >= report_s
        if self._reported and not reported and self.ended is None:
            consequence = (
                "it restarts no actor and obeys no command. An agent that is frozen is killed by its guard after "
                f"{limit_s:g} s (supervision.silence_s), with its host's part of the run"
            )
            progress.warn([f"{self.name}: no sign of life for {silent_s:.0f} s; {consequence}"])
        # An agent whose loop hangs, and beats to its guard, has ``watchdog.stall_s`` more.
        cut_s = config.watchdog.stall_s + limit_s + supervision.host_lost_s if self.ended is None else PARTING_S
        if silent_s >= cut_s + self._cuts * PARTING_S:
            what = "neither it nor its guard shows a sign of life" if self.ended is None else "its guard has not ended"
            progress.warn([f"{self.name}: {what} for {silent_s:.0f} s; its connection is cut"])
            self.cut()

    def cut(self) -> None:
        """End its connection. On this host: kill the agent and have its guard end the rest; then kill the guard."""
        self._cuts += 1
        self.contact.kill()


async def watch_silence(members: Sequence[AgentHandle], config: Config, progress: TerminalProgress) -> None:
    """Look at the agents until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        for member in members:
            member.look(config, progress)


async def end_in_steps(members: Sequence[AgentHandle], drain_s: float) -> None:
    """End those that have not heard that the run is over, each step with the next one's deadline."""
    for command, timeout in ((STOP, drain_s + SLACK_S), (KILL, SLACK_S)):
        for member in members:
            member.send(command)
        await asyncio.sleep(timeout)
    hang_up(members)


async def kill_members(members: Sequence[AgentHandle], interrupts: Interrupts) -> None:
    """End everything at once; connections that are left are cut after a moment, or at another signal."""
    for member in members:
        member.send(KILL)
    await interrupts.next(SLACK_S)
    hang_up(members)


def hang_up(members: Sequence[AgentHandle]) -> None:
    """Cut the connections that are left. On this host kill the agent, and its guard ends the rest."""
    for member in members:
        if not member.over:
            member.cut()


def _append(logs: Path, event: LogEvent) -> None:
    # The name comes from another host, and is to lead to no other folder.
    if Path(event.file).name == event.file and event.file.endswith(".log"):
        with contextlib.suppress(OSError), (logs / event.file).open("a") as file:
            file.write(event.text)

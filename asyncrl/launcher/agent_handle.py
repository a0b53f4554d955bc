"""The follower's handle on one running agent: reads its events, sends it commands and records how it ends.

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
"""Seconds between two checks whether an agent has sent anything."""
REPORT_SHARE = 0.5
"""An agent that is silent for this share of supervision.silence_s is reported."""
PARTING_S = 20.0
"""Seconds that a guard has to end the actors of its dead agent, and between two cuts. The guard gives up after half."""
SLACK_S = 1.5
"""Seconds after ``drain_s`` until an agent is asked to kill its actors, and again until it is killed itself."""


@dataclass(eq=False)
class AgentHandle:
    """One host of the run, the connection to its agent, and what the launcher knows of that agent."""

    index: int
    contact: Contact
    ended: EndedEvent | None = None
    """The agent's last event, which says how its part of the run ended; None until it arrives."""
    exit_code: int | None = None
    lost: bool = False
    """True if the connection ended before the agent reported its end."""
    silence: Silence = field(default_factory=lambda: Silence(LOOK_S))
    _heard: bool = False
    """True if the agent sent a line since the last ``look``."""
    _spoken: bool = False
    """True once the agent has sent a line; until then it has longer before its silence is reported."""
    _reported: bool = False
    """True while a reported silence lasts."""
    _cuts: int = 0
    """How often ``cut`` was called."""

    @property
    def over(self) -> bool:
        """True once the connection has ended: no more events come, and ``exit_code`` is known."""
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
        """Describes how the agent's process ended, for messages."""
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
        """Describes the loss of the connection, with the reason if it is known, for messages."""
        why = f" ({self.contact.last_error})" if self.contact.last_error else ""
        if self._cuts:
            why = f" (no sign of life for {self.silence.seconds:.0f} s)"
        return f"{self.host}: the connection is lost{why}"

    def send(self, command: bytes) -> None:
        """Write a command to the agent's standard input. The command is lost if the connection has ended."""
        if not self.over:
            self.contact.send(command)

    async def hear(self, logs: Path, progress: TerminalProgress, take: Callable[[Any], None]) -> None:
        """Read the agent's events until its connection ends, then set ``exit_code`` and ``lost``.

        Log lines are appended to files in ``logs``, lines that are no event are shown, heartbeats only end a silence.
        ``take`` is called with every other event.
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
        """Check whether the agent sent anything since the last call; the caller does so every LOOK_S.

        Reports a silence and its end. If the silence is much longer than the guard allows, cuts the connection.
        """
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
    """Call ``look`` on every agent each LOOK_S, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        for member in members:
            member.look(config, progress)


async def end_in_steps(members: Sequence[AgentHandle], drain_s: float) -> None:
    """End agents that have not ended by themselves: ask them to stop, then to kill their actors, then cut them off.

    Waits ``drain_s`` plus SLACK_S after the first step and SLACK_S after the second.
    """
    for command, timeout in ((STOP, drain_s + SLACK_S), (KILL, SLACK_S)):
        for member in members:
            member.send(command)
        await asyncio.sleep(timeout)
    hang_up(members)


async def kill_members(members: Sequence[AgentHandle], interrupts: Interrupts) -> None:
    """Ask all agents to kill their actors; after SLACK_S, or at another signal, cut the connections that are left."""
    for member in members:
        member.send(KILL)
    await interrupts.next(SLACK_S)
    hang_up(members)


def hang_up(members: Sequence[AgentHandle]) -> None:
    """Cut the connections of agents that have not ended. On this host, kill the agent; its guard ends its actors."""
    for member in members:
        if not member.over:
            member.cut()


def _append(logs: Path, event: LogEvent) -> None:
    # The file name comes from another host: a name that leads out of ``logs`` is ignored.
    if Path(event.file).name == event.file and event.file.endswith(".log"):
        with contextlib.suppress(OSError), (logs / event.file).open("a") as file:
            file.write(event.text)

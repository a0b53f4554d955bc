"""The launcher's handle on one node agent: reads its events, sends it commands and records how it ends.

A node agent runs the actors of one host. Its guard is its parent process, which ends what a dead agent leaves behind
(node/guard.py). To end an agent, the launcher asks it to stop, then to kill its actors, and at last cuts its
connection. Each step has a deadline.

``watch_silence`` reports when an agent falls silent and when it is heard again. The guard kills a frozen agent after
``supervision.agent_silence_s``. If the silence lasts much longer, the guard is frozen too, and the launcher cuts the
connection. On this host the cut kills the agent; another host just loses its connection. Time in which the launcher
itself was stopped does not count.
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
"""Share of ``supervision.agent_silence_s`` after which the launcher reports a silent agent."""
PARTING_S = 20.0
"""Seconds of silence before the connection of an agent that has reported its end is cut, and between two cuts.

The agent's guard needs at most half of this time to end what is left.
"""
SLACK_S = 1.5
"""Seconds that an agent gets beyond ``drain_s`` before the KILL command, and from that command to the cut."""


@dataclass(eq=False)
class AgentHandle:
    """The agent of one host of the run: the connection to it, and the launcher's view of its state."""

    index: int
    contact: Contact
    ended: EndedEvent | None = None
    """The agent's last event: how the run ended, or that the host has left it; None until it arrives."""
    exit_code: int | None = None
    """Exit code of the connection's process; None while the connection lasts."""
    lost: bool = False
    """True if the connection broke before the agent reported its end."""
    silence: Silence = field(default_factory=lambda: Silence(LOOK_S))
    """Time since the agent was last heard, as ``look`` counts it."""
    _heard_since_look: bool = False
    """True if the agent sent a line since the last ``look``."""
    _ever_heard: bool = False
    """True once the agent has sent a line. Before that, a silence shorter than FIRST_WORD_S is not reported."""
    _reported: bool = False
    """True if the agent was silent for long enough to be reported at the last ``look``."""
    _cuts: int = 0
    """How often the connection was cut."""

    @property
    def over(self) -> bool:
        """True once the connection has ended: no more events come, and ``exit_code`` is known."""
        return self.exit_code is not None

    @property
    def host(self) -> str:
        """Name of the host; empty in a run without a hostfile or a SLURM job."""
        return self.contact.name

    @property
    def name(self) -> str:
        """Name of the agent, with the host if that has a name."""
        return agent_name(self.index) + (f" on {self.host}" if self.host else "")

    @property
    def log(self) -> str:
        """File name of the agent's own log."""
        return f"agent-{self.index}.log"

    @property
    def exit_words(self) -> str:
        """How the agent's process ended, as part of a message. The connection must have ended."""
        assert self.exit_code is not None
        # The guard exits with 128 + N if signal N killed its agent; describe_exit takes -N.
        words = describe_exit(self.exit_code if self.exit_code < 128 else 128 - self.exit_code)
        return (
            f"frozen, without a sign of life for {self.silence.seconds:.0f} s, then {words}"
            if self._reported
            else words
        )

    @property
    def loss_words(self) -> str:
        """The loss of the connection as part of a message, with the reason if it is known."""
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

        Every line ends a silence; a heartbeat does nothing else. The text of a LogEvent is appended to a file in
        ``logs``, and a line that is no event is shown. ``take`` gets every other event. An EndedEvent is also kept in
        ``ended`` and answered with ARRIVED, after which the agent may delete its logs.
        """
        output = self.contact.process.stdout
        assert output is not None
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
        while line := await output.readline():
            self._heard_since_look = True
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:
                # Other programs write to a connection too, for example ssh.
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
        """Check whether the agent sent anything since the last call. The caller repeats this every LOOK_S.

        Reports the start and the end of a long silence. Cuts the connection if the silence lasts much longer than the
        guard allows, or PARTING_S after the agent has reported its end. Repeats the cut every PARTING_S.
        """
        if self.over:
            return
        supervision = config.supervision
        limit_s = supervision.agent_silence_s
        silent_s, was_reported = self.silence.look(heard=self._heard_since_look), self._reported
        if self._heard_since_look and was_reported:
            progress.say(f"{self.name} is heard again")
        self._ever_heard |= self._heard_since_look
        report_s = REPORT_SHARE * limit_s if self._ever_heard else max(REPORT_SHARE * limit_s, FIRST_WORD_S)
        self._heard_since_look, self._reported = False, silent_s >= report_s
        if self._reported and not was_reported and self.ended is None:
            consequence = (
                "it restarts no actor and obeys no command. An agent that is frozen is killed by its guard after "
                f"{limit_s:g} s (supervision.silence_s), with its host's part of the run"
            )
            progress.warn([f"{self.name}: no sign of life for {silent_s:.0f} s; {consequence}"])
        # An agent whose event loop hangs sends its guard heartbeats for stall_s. The guard kills it limit_s after that.
        cut_s = config.watchdog.stall_s + limit_s + supervision.host_lost_s if self.ended is None else PARTING_S
        if silent_s >= cut_s + self._cuts * PARTING_S:
            what = "neither it nor its guard shows a sign of life" if self.ended is None else "its guard has not ended"
            progress.warn([f"{self.name}: {what} for {silent_s:.0f} s; its connection is cut"])
            self.cut()

    def cut(self) -> None:
        """End the connection. On this host, kill the agent, whose guard ends the rest; a second cut kills the guard."""
        self._cuts += 1
        self.contact.kill()


async def watch_silence(members: Sequence[AgentHandle], config: Config, progress: TerminalProgress) -> None:
    """Call ``look`` on every agent each LOOK_S, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        for member in members:
            member.look(config, progress)


async def end_in_steps(members: Sequence[AgentHandle], drain_s: float) -> None:
    """Ask the agents to stop, then to kill their actors, and then cut the connections that are left.

    Waits ``drain_s`` plus SLACK_S after the first step and SLACK_S after the second. The caller may cancel it earlier.
    """
    for command, timeout in ((STOP, drain_s + SLACK_S), (KILL, SLACK_S)):
        for member in members:
            member.send(command)
        await asyncio.sleep(timeout)
    hang_up(members)


async def kill_members(members: Sequence[AgentHandle], interrupts: Interrupts) -> None:
    """Ask all agents to kill their actors. After SLACK_S, or at another signal, cut the connections that are left."""
    for member in members:
        member.send(KILL)
    await interrupts.next(SLACK_S)
    hang_up(members)


def hang_up(members: Sequence[AgentHandle]) -> None:
    """Cut the connection of every agent that has not ended."""
    for member in members:
        if not member.over:
            member.cut()


def _append(logs: Path, event: LogEvent) -> None:
    # Another host sends the file name: ignore one that leads out of ``logs``.
    if Path(event.file).name == event.file and event.file.endswith(".log"):
        with contextlib.suppress(OSError), (logs / event.file).open("a") as file:
            file.write(event.text)

"""A living agent as its follower has it: what it says, what it is told, and how it ends.

It is told to end, then to kill, and then its connection is cut, each step with a deadline. Its log lines are appended
to those of the run, and all other lines of a connection are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.launcher.fleet.contact import Contact
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.launcher.terms.spec import ARRIVED, KILL, STOP, EndedEvent, Event, LogEvent, agent_name
from asyncrl.runtime.lifecycle.supervision import describe_exit

SLACK_S = 1.5
"""Time beyond ``drain_s`` that an agent has before it is told to kill, and then before it is killed."""


@dataclass(eq=False)
class AgentHandle:
    """A host of the run with its living agent. ``contact`` is None for one that is this process's own child."""

    index: int
    host: str
    """Name of the host; empty in a run on one host."""
    process: asyncio.subprocess.Process
    contact: Contact | None = None
    ended: EndedEvent | None = None
    """The last event; None before it has come."""
    exit_code: int | None = None
    lost: bool = False
    """Whether its connection ended, and nobody knows what became of it."""

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.exit_code is not None

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
        # The guard tells the signal that killed its agent as 128 and the signal's number.
        return describe_exit(self.exit_code if self.exit_code < 128 else 128 - self.exit_code)

    @property
    def loss_words(self) -> str:
        """Words for the loss of its connection, with the reason where it is known."""
        assert self.contact is not None
        why = f" ({self.contact.last_error})" if self.contact.last_error else ""
        return f"{self.host}: the connection is lost{why}"

    def send(self, command: bytes) -> None:
        """Send a command; lost if its standard input is not there any more."""
        assert self.process.stdin is not None
        if not self.over and not self.process.stdin.is_closing():
            self.process.stdin.write(command)

    async def hear(self, logs: Path, progress: Progress, take: Callable[[Any], None]) -> None:
        """Read until nothing more comes, every event that is no log given to ``take``; then it is known how it ended.

        Its log lines are appended to the files in ``logs``.
        """
        assert self.process.stdout is not None
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
        while line := await self.process.stdout.readline():
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:
                # Not the agent's: other things write to a connection too.
                progress.warn([f"{self.name}: {line.decode(errors='replace').strip()}"])
                continue
            if isinstance(event, LogEvent):
                _append(logs, event)
                continue
            if isinstance(event, EndedEvent):
                self.ended = event
                self.send(ARRIVED)
            take(event)
        code = await (self.process.wait() if self.contact is None else self.contact.exited())
        self.lost = self.contact is not None and self.contact.is_lost(code) and self.ended is None
        self.exit_code = code


async def end_in_steps(members: Sequence[AgentHandle], drain_s: float) -> None:
    """Tell those who have not heard that the run is over to end, each step with the next one's deadline."""
    for command, timeout in ((STOP, drain_s + SLACK_S), (KILL, SLACK_S)):
        for member in members:
            member.send(command)
        await asyncio.sleep(timeout)
    hang_up(members)


def hang_up(members: Sequence[AgentHandle]) -> None:
    """Cut the connections that are left."""
    for member in members:
        if not member.over and member.contact is not None:
            member.contact.kill()


def _append(logs: Path, event: LogEvent) -> None:
    # The name comes from another host, and is to lead to no other folder.
    if Path(event.file).name == event.file and event.file.endswith(".log"):
        with contextlib.suppress(OSError), (logs / event.file).open("a") as file:
            file.write(event.text)

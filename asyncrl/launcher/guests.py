"""Follows the hosts that have joined a run, and nobody else, to their end.

What they write and say is shown and kept as by the run's own launcher. They end with the run, or when they leave it: by
``--leave``, because the controller lets them go, or because this command is interrupted. The first signal has the
controller drain them, a second one ends them at once; the run goes on without them. One that the controller does not
let go, as the last with a rollouter, goes on until then. A lost connection ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ActorFailed, AsyncRLError, UsageError
from asyncrl.launcher.follow import SLACK_S, STOPPING, Member
from asyncrl.launcher.link import agent_name
from asyncrl.launcher.living import Controller, LivingRun
from asyncrl.launcher.progress import Progress
from asyncrl.launcher.spec import ARRIVED, KILL, STOP, EndedEvent, Event, LogEvent, StateEvent
from asyncrl.messages import Leave, MemberHost
from asyncrl.runtime.supervision import describe_exit

ASK_S = 20.0


@dataclass
class Guests:
    """See the module."""

    run: LivingRun
    members: Sequence[Member]
    controller: Controller
    progress: Progress
    signal: int = 0
    _told: dict[str, str] = field(default_factory=dict)
    """The stage of each host that was shown last, by agent."""
    _served: set[str] = field(default_factory=set)
    """Agents of the hosts that have served."""
    _refused: bool = False
    """Whether a host cannot leave."""
    _killing: bool = False
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    async def main(self) -> int:
        """Until all have ended; the exit code."""
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._end_when_asked()), tasks.create_task(self._watch_members())]
                await asyncio.gather(*(self._follow(member) for member in self.members))
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            # The hosts go on with the run, but nobody follows them any more.
            raise group.exceptions[0] from None
        self.progress.end()
        return self._exit_code([self._conclude(member) for member in self.members])

    # --- events ---

    async def _follow(self, member: Member) -> None:
        assert member.process.stdout is not None
        assert member.contact is not None
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
        while line := await member.process.stdout.readline():
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:
                self.progress.warn([f"{_name(member)}: {line.decode(errors='replace').strip()}"])
            else:
                self._take(member, event)
        code = await member.contact.exited()
        member.lost = member.contact.start.is_lost(code) and member.ended is None
        member.exit_code = code

    def _take(self, member: Member, event: Any) -> None:
        match event:
            case EndedEvent():
                member.ended = event
                member.send(ARRIVED)
            case LogEvent(file=name, text=text):
                if Path(name).name == name and name.endswith(".log"):
                    with contextlib.suppress(OSError), (self.run.folder.logs / name).open("a") as file:
                        file.write(text)
            case StateEvent():
                if member is next((other for other in self.members if not other.over), None):
                    self.progress.show(event)
            case _:
                self.progress.show(event)

    async def _watch_members(self) -> None:
        own = {agent_name(member.index) for member in self.members}
        async for members in self.controller.members():
            for host in members.hosts:
                if host.agent in own and self._told.get(host.agent) != host.stage:
                    self._told[host.agent] = host.stage
                    self._show(host)
        await self._end_with_run()

    def _show(self, host: MemberHost) -> None:
        if host.stage == "serving":
            self._served.add(host.agent)
            self.progress.say(f"{host.host}: {', '.join(host.actors)} serve from now on")
        elif host.stage == "leaving":
            self.progress.say(f"{host.host} leaves" + (f": {host.reason}" if host.reason else ""))

    # --- the end ---

    async def _end_with_run(self) -> None:
        """The run is over on its head. Those who have not heard of it are told, with the next step's deadline each."""
        for command, timeout in ((STOP, self.run.config.supervision.drain_s + SLACK_S), (KILL, SLACK_S)):
            for member in self.members:
                member.send(command)
            await asyncio.sleep(timeout)
        self._hang_up()

    def _hang_up(self) -> None:
        for member in self.members:
            if not member.over and member.contact is not None:
                member.contact.kill()

    async def _end_when_asked(self) -> None:
        await self._interrupted.wait()
        within = self.run.config.supervision.drain_s
        self.progress.say("the run goes on without these hosts, which end in good order; again to end them at once")
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._ask_to_leave(member, within)) for member in self.members]
            # The agent itself gives its actors that much, and then as much again.
            await self._next_interrupt(within + self.run.config.supervision.drain_s + SLACK_S)
            for task in asking:
                task.cancel()
        if self._refused:
            await self._interrupted.wait()
        self._killing = True
        self.progress.say("ending them at once")
        for member in self.members:
            member.send(KILL)
        await self._next_interrupt(SLACK_S)
        self._hang_up()

    async def _ask_to_leave(self, member: Member, within: float) -> None:
        if member.over:
            return
        reason = f"its launcher was ended by {signal.Signals(self.signal).name}"
        try:
            leave = Leave(host=agent_name(member.index), within_s=within, reason=reason)
            await self.controller.ask(leave, timeout=ASK_S)
        except AsyncRLError as error:
            self._refused |= isinstance(error, UsageError)
            self.progress.warn([str(error)])

    def _interrupt(self, number: int) -> None:
        self.signal = self.signal or number
        self._interrupted.set()

    async def _next_interrupt(self, timeout: float) -> None:
        self._interrupted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._interrupted.wait()

    def _conclude(self, member: Member) -> int:
        """Say how it ended; the exit code that this amounts to."""
        ended = member.ended
        if ended is None and member.lost:
            assert member.contact is not None
            why = f" ({member.contact.last_error})" if member.contact.last_error else ""
            self.progress.warn([f"{member.host}: the connection is lost{why}; what runs there goes on with the run"])
            return 1
        if ended is None:
            assert member.exit_code is not None
            words = describe_exit(member.exit_code if member.exit_code < 128 else 128 - member.exit_code)
            log = str(self.run.folder.logs / f"agent-{member.index}.log")
            self.progress.say(str(ActorFailed(_name(member), words, log=log)))
            return 1
        if ended.result == "failed":
            self.progress.say(str(ActorFailed(ended.actor, ended.reason, log=ended.log)))
        elif ended.result == "left" and (self.signal or agent_name(member.index) in self._served):
            self.progress.say(f"{member.host} has left the run")
        elif ended.result == "left":
            self.progress.warn([f"{member.host} has left the run without having served"])
            return 1
        elif self._killing:
            self.progress.say(f"{member.host} was ended at once")
        else:
            how = {"done": "is done", "preempted": "made way"}.get(ended.result, "was ended before its last step")
            self.progress.say(f"{member.host} ends with the run, which {how}")
        return ended.exit_code

    def _exit_code(self, codes: Sequence[int]) -> int:
        if self.signal and not any(code in (1, 2, 78) for code in codes):
            return 128 + self.signal
        return max(codes)


def _name(member: Member) -> str:
    return f"{agent_name(member.index)} on {member.host}"

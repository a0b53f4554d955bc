"""Follows the hosts that one command has added to a run, to their end.

The command shows and keeps their events and logs as the run's own launcher does. The hosts end with the run, or when
they leave: by ``--leave``, because the controller lets them go, or because this command is interrupted. The first
signal makes the controller drain them, a second one ends them at once; the run continues without them. A host that the
controller does not let go, because it has the last rollouter, continues until then. A lost connection ends nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.core.errors import ActorFailed, AsyncRLError, UsageError
from asyncrl.launcher.agent_handle import (
    SLACK_S,
    AgentHandle,
    end_in_steps,
    kill_members,
    watch_silence,
)
from asyncrl.launcher.common.agent_messages import EndedEvent, StateEvent, agent_name
from asyncrl.launcher.live.live_run import LiveController, LiveRun
from asyncrl.launcher.terminal.interrupts import Interrupts
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.hosts import Leave

ASK_S = 20.0


@dataclass
class JoinedHosts:
    """The hosts that this command has added, with their agents as ``members``."""

    run: LiveRun
    members: Sequence[AgentHandle]
    controller: LiveController
    progress: TerminalProgress
    interrupts: Interrupts = field(default_factory=Interrupts)
    _seen: set[str] = field(default_factory=set)
    """Agents and actors that have served, and agents that leave: each is shown once."""
    _refused: bool = False
    """Whether a host cannot leave."""
    _killing: bool = False

    async def main(self) -> int:
        """Follow the hosts until all have ended; the exit code."""
        self.interrupts.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._end_when_asked()),
                    tasks.create_task(self._watch_members()),
                    tasks.create_task(watch_silence(self.members, self.run.config, self.progress)),
                ]
                await asyncio.gather(*(self._follow(member) for member in self.members))
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            # The hosts continue with the run, but their events are not shown any more.
            raise group.exceptions[0] from None
        self.progress.end()
        return self._exit_code([self._conclude(member) for member in self.members])

    # --- events ---

    async def _follow(self, member: AgentHandle) -> None:
        await member.hear(self.run.folder.logs, self.progress, lambda event: self._take(member, event))

    def _take(self, member: AgentHandle, event: Any) -> None:
        is_first = member is next((one for one in self.members if not one.over), None)
        if not isinstance(event, EndedEvent | StateEvent) or (isinstance(event, StateEvent) and is_first):
            self.progress.show(event)

    async def _watch_members(self) -> None:
        own = {agent_name(member.index) for member in self.members}
        async for members in self.controller.members():
            for host in [host for host in members.hosts if host.agent in own]:
                if new := [name for name in host.actors if name in members.serving and name not in self._seen]:
                    self._seen |= {host.agent, *new}
                    self.progress.say(f"{host.host}: {', '.join(new)} serve from now on")
                if host.stage == "leaving" and f"{host.agent} leaves" not in self._seen:
                    self._seen.add(f"{host.agent} leaves")
                    self.progress.say(f"{host.host} leaves" + (f": {host.reason}" if host.reason else ""))
        # The run has ended on its head.
        await end_in_steps(self.members, self.run.config.supervision.drain_s)

    # --- the end ---

    async def _end_when_asked(self) -> None:
        await self.interrupts.first()
        within = self.run.config.supervision.drain_s
        self.progress.say(
            "these hosts are drained, and the run continues without them; signal again to end them at once"
        )
        asking = asyncio.gather(*(self._ask_to_leave(member, within) for member in self.members))
        # An agent gives its actors ``within`` seconds, and then drain_s to end.
        await self.interrupts.next(within + self.run.config.supervision.drain_s + SLACK_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if self._refused:
            await self.interrupts.first()
        self._killing = True
        self.progress.say("ending them at once")
        await kill_members(self.members, self.interrupts)

    async def _ask_to_leave(self, member: AgentHandle, within: float) -> None:
        if member.over:
            return
        reason = f"its launcher was ended by {signal.Signals(self.interrupts.signal).name}"
        try:
            leave = Leave(host=agent_name(member.index), within_s=within, reason=reason)
            await self.controller.ask(leave, timeout=ASK_S)
        except AsyncRLError as error:
            self._refused |= isinstance(error, UsageError)
            self.progress.warn([str(error)])

    def _conclude(self, member: AgentHandle) -> int:
        """Show how a member ended; the exit code for it."""
        ended = member.ended
        if ended is None and member.lost:
            self.progress.warn([f"{member.loss_words}; its actors continue with the run"])
            return 1
        if ended is None:
            log = str(self.run.folder.logs / member.log)
            self.progress.warn([str(ActorFailed(member.name, member.exit_words, log=log))])
            return 1
        if ended.result == "failed":
            self.progress.warn([str(ActorFailed(ended.actor, ended.reason, log=ended.log))])
        elif ended.result == "left" and (self.interrupts.signal or agent_name(member.index) in self._seen):
            self.progress.say(f"{member.host} has left the run")
        elif ended.result == "left":
            why = f": {ended.reason}" if ended.reason else ""
            self.progress.warn([f"{member.host} has left the run without having served{why}"])
            return 1
        elif self._killing:
            self.progress.say(f"{member.host} was ended at once")
        else:
            how = {"done": "is done", "preempted": "was preempted"}.get(ended.result, "ended before its last step")
            self.progress.say(f"{member.host} ends with the run, which {how}")
        return ended.exit_code

    def _exit_code(self, codes: Sequence[int]) -> int:
        if self.interrupts.signal and not any(code in (1, 2, 78) for code in codes):
            return 128 + self.interrupts.signal
        return max(codes)

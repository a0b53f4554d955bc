"""Follows the node agents of a run, one on each host, until all have ended, and passes the user's signals on.

The head is the host of the controller. The launcher asks the head's agent to end the run, and this agent reports how
the run ended. The other agents learn the end from the controller. The first signal preempts a run, or ends it in order
during the start. The second signal ends it at once. A process that hangs delays the end only for a bounded time. If an
agent does not end its actors within ``drain_s`` of the run's end, the launcher asks it to kill them. If that fails, the
launcher kills the agent, and its guard ends the rest (agent_handle.py).

A lost connection ends nothing: the run continues without that host's events. At the end the launcher connects to the
host again, for a bounded time, to check that no process is left. If the connection to the head is lost, the launcher
closes the other connections too, so that those agents end with the controller.

When ``main`` returns, no process of the run is left, or the launcher has named the hosts where one may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE, HostFailed
from asyncrl.launcher.agent_handle import (
    SLACK_S,
    AgentHandle,
    end_in_steps,
    kill_members,
    watch_silence,
)
from asyncrl.launcher.common.agent_messages import (
    AT_ONCE,
    CONTROLLER_AT,
    KILL,
    PREEMPT,
    STOP,
    ControllerEvent,
    EndedEvent,
    EndOrder,
    HostEnded,
    StateEvent,
)
from asyncrl.launcher.common.signals import cause_of
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.run_folder.ended import find_left, read_ended
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.terminal.interrupts import Interrupts
from asyncrl.launcher.terminal.progress import TerminalProgress

CONFIRM_S = 30.0
"""Seconds for which the launcher tries to reach a host again, or waits for one answer."""
ENDED_BY_CODE = {
    0: EndedEvent(result="done"),
    PREEMPTED_EXIT_CODE: EndedEvent(
        result="preempted", reason="asked to end; the launcher did not hear by what", exit_code=PREEMPTED_EXIT_CODE
    ),
}
"""The end of a run by the exit code of an agent. It is used if the agent's last event did not arrive."""
LOOK_AGAIN_S = 2.0
"""Seconds that the head's host waits for the end of the run before it answers over a new connection.

Also the pause after a failed try to ask it.
"""


@dataclass
class Follower:
    """Follows the agents of a run. ``members`` are in the order of their index, the head first."""

    config: Config
    folder: RunFolder
    members: Sequence[AgentHandle]
    progress: TerminalProgress
    interrupts: Interrupts = field(default_factory=Interrupts)
    on_running: Callable[[], None] = lambda: None
    """Called once, when the run first enters its running phase."""
    phase: str = ""
    """Phase of the run in the newest state; empty before it."""
    has_run: bool = False
    """True once the run was in its running phase; stays true when a restarted controller reports a start again."""
    _failure: EndedEvent | None = None
    """The first unexpected end of an agent."""
    _killing: bool = False
    """True once the run is to end at once."""

    @property
    def _head(self) -> AgentHandle:
        return self.members[0]

    async def main(self) -> EndedEvent:
        """Show the agents' events until all agents have ended, and return how the run ended.

        When the head has ended, ends the other agents. If the head's connection is lost and no agent has reported the
        end, waits for the head's record of it. At last makes sure that nothing of the run is left.
        """
        self.interrupts.listen()
        obeying = asyncio.create_task(self._obey_signals())
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(watch_silence(self.members, self.config, self.progress))]
                following = [tasks.create_task(self._follow(member)) for member in self.members]
                await asyncio.wait(following[:1])
                if not (self._head.lost or all(member.over for member in self.members)):
                    # The run has ended on the head, and agents still run elsewhere.
                    ending = end_in_steps(self.members, self.config.supervision.drain_s)
                    background.append(tasks.create_task(ending))
                await asyncio.wait(following)
                for task in background:
                    task.cancel()
            if self._head.lost and self._reported_end is None:
                await self._wait_for_lost_head()
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            await self._end_leftovers()
        return self._with_signal(self._result())

    # --- events ---

    async def _follow(self, member: AgentHandle) -> None:
        """Read a member's events until its connection ends, find out how the agent ended, and handle that end."""
        await member.hear(self.folder.logs, self.progress, lambda event: self._handle_event(member, event))
        if member.ended is None and not member.lost and not self._killing:
            member.ended = await self._recover_end(member)
        elif member.ended is None and member is self._head and self._killing and self.interrupts.second:
            # The head hung, and was killed at the second signal.
            member.ended = await asyncio.to_thread(self._end_of_killed_run)
        self._handle_end(member)

    def _end_of_killed_run(self) -> EndedEvent:
        """Return the result of a run that a second signal killed: preempted if it has a checkpoint, else stopped."""
        if find_left(self.config, self.folder).checkpoint is None:
            return EndedEvent(result="stopped", reason=AT_ONCE, exit_code=STOPPED_EXIT_CODE)
        return EndedEvent(result="preempted", reason=AT_ONCE, exit_code=PREEMPTED_EXIT_CODE)

    async def _recover_end(self, member: AgentHandle) -> EndedEvent | None:
        """Return how an agent ended if it exited, but its last event did not arrive.

        This happens, for example, if this process was suspended. A lost connection is not such a case. Only the head's
        agent records the end: for it, look in the run folder, and then ask the head's host if that is another one. For
        other agents and without a record, the exit code decides. Returns None for a code that is not in ENDED_BY_CODE.
        """
        ended = None
        if member is self._head:
            with contextlib.suppress(OSError):
                ended = await asyncio.to_thread(read_ended, self.folder)
            if ended is None and not member.contact.is_here:
                with contextlib.suppress(HostFailed, TimeoutError):
                    found = await self._ask_again(member, CONFIRM_S, patience_s=0.0, kill=False)
                    ended = found.ended
        # The head may have no record if its disk was full.
        return ended or ENDED_BY_CODE.get(-1 if member.exit_code is None else member.exit_code)

    def _handle_event(self, member: AgentHandle, event: Any) -> None:
        """Act on an event of a member: note failures and the phase, pass the controller's address on, show the rest.

        Only the states that ``_state_reporter`` sends count, because all agents report the same state of the run.
        """
        match event:
            case EndedEvent():
                if event.result == "failed" and member is not self._head:
                    self._fail(event)
                elif event.result == "left" and event.reason:
                    self.progress.warn([f"{member.host} has left the run without having taken part: {event.reason}"])
                elif event.result == "left":
                    self.progress.say(f"{member.host} has left the run")
            case ControllerEvent(address=address):
                for other in self.members[1:]:
                    other.send(CONTROLLER_AT + address.encode() + b"\n")
            case StateEvent():
                if member is self._state_reporter():
                    self.phase = event.phase
                    self.progress.show(event)
                    # The run may be preempted before a state of its running phase arrives.
                    if event.phase in ("running", "preempting") and not self.has_run:
                        self.has_run = True
                        self.on_running()
            case _:
                self.progress.show(event)

    def _handle_end(self, member: AgentHandle) -> None:
        """Act on the end of a member's connection: warn about a lost one, and fail the run for an unexplained end.

        If the head is lost, closes the connections to the other agents, so that they end with the controller.
        """
        if member.lost and not self._killing:
            self.progress.warn([f"{member.loss_words}; its actors continue"])
            if member is self._head:
                self.progress.warn(["that is the head: the run continues without a display"])
                for other in self.members[1:]:
                    other.contact.hang_up()
        # The user's second signal asked for this end, so it is no failure.
        elif member.ended is None and not (self._killing and self.interrupts.second):
            log = str(self.folder.logs / member.log)
            why = "it did not end its actors in time, and was killed" if self._killing else member.exit_words
            self._fail(EndedEvent(result="failed", actor=member.name, reason=why, log=log))

    def _fail(self, event: EndedEvent) -> None:
        """Record an agent's unexpected end, and stop the run unless it is ending already. Only the first one counts."""
        if self._failure is not None:
            return
        self._failure = msgspec.structs.replace(event, exit_code=event.exit_code or 1)
        if self.phase not in ("preempting", "draining") and not self.interrupts.signal:
            # STOP would cut short the end of a run that is ending already, or that the user has preempted.
            self._head.send(STOP)

    def _state_reporter(self) -> AgentHandle | None:
        """Return the member whose StateEvents count: the first that is not lost, so the head while it is connected."""
        return next((member for member in self.members if not member.lost), None)

    @property
    def _reported_end(self) -> EndedEvent | None:
        """How the run ended, by the first report other than "left"; None without one."""
        ends = (member.ended for member in self.members)
        return next((ended for ended in ends if ended is not None and ended.result != "left"), None)

    # --- the end ---

    async def _obey_signals(self) -> None:
        """Wait for a signal, preempt the run, and kill it at a second signal or if it does not end in time.

        The time is ``drain_s`` and SLACK_S. A run that may write a checkpoint gets ``grace_s`` and another ``drain_s``.
        The request to preempt stops a run that is still starting, and a run without trainer steps. A run in its
        draining phase gets no request, just the time. ``main`` cancels this once the run has ended.
        """
        await self.interrupts.first()
        patience_s = self.config.supervision.drain_s + SLACK_S
        # The phase may be draining already: the agents may have received the same signal.
        if self.has_run and self.phase != "draining" and self.config.learner.steps:
            grace_s = self.config.preempt.grace_s
            self.progress.say(
                f"stopping: a checkpoint is written within {grace_s:g} s; a second Ctrl-C ends the run at once"
            )
            # The controller, or without it the agent, allows this time from the moment that the request arrives.
            patience_s += grace_s + self.config.supervision.drain_s
        else:
            self.progress.say("ending the actors in order; a second Ctrl-C ends the run at once")
        async with asyncio.TaskGroup() as tasks:
            preempting = tasks.create_task(self._preempt_head()) if self.phase != "draining" else None
            await self.interrupts.next(patience_s)
            if preempting is not None:
                preempting.cancel()
        self.progress.say("ending at once")
        self._killing = True
        await kill_members(self.members, self.interrupts)

    async def _preempt_head(self) -> None:
        """Ask the head's agent to preempt the run. If its connection is lost, ask over a new one.

        The agent decides whether there is anything to keep in a checkpoint.
        """
        if not self._head.lost:
            self._head.send(PREEMPT + cause_of(self.interrupts.signal).encode() + b"\n")
            return
        # No other agent can be asked: their connections were closed when the head's was lost.
        try:
            await self._ask_again(self._head, CONFIRM_S, patience_s=0.0, kill=False, preempt=True)
        except (HostFailed, TimeoutError) as error:
            self.progress.warn([f"{self._head.host}: cannot be asked to preempt the run ({_reason(error)})"])
        else:
            self.progress.say(f"{self._head.host}: is asked to preempt the run")

    async def _end_leftovers(self) -> None:
        """End an agent that is left on this host, and check the other hosts whose end is unknown."""
        for member in self.members:
            if member.contact.is_here and member.contact.process.returncode is None:
                # ``send`` writes only to an agent without an exit code.
                member.exit_code = None
                member.send(KILL)
                await member.contact.process.wait()
        unknown = [member for member in self.members if not (member.contact.is_here or self._is_gone(member))]
        await asyncio.gather(*(self._confirm_ended(member) for member in unknown))

    async def _wait_for_lost_head(self) -> None:
        """Ask a lost head over new connections until nothing of the run lives there, and take its record of the end.

        Gives up once the run is to end at once, or if the head does not answer for ``host_grace_s`` plus ``drain_s``.
        """
        head, supervision = self._head, self.config.supervision
        order = self._order(head, patience_s=LOOK_AGAIN_S, kill=False)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + supervision.host_grace_s + supervision.drain_s
        while not self._killing and loop.time() < give_up_at:
            contact = Contact(head.host, head.contact.start)
            try:
                async with asyncio.timeout(CONFIRM_S):
                    await contact.reach()
                while not self._killing:
                    async with asyncio.timeout(CONFIRM_S):
                        answer = await contact.ask(order, HostEnded)
                    if not answer.living:
                        head.ended = answer.ended
                        return
                    # The head has answered, so the time to reach it starts again.
                    give_up_at = loop.time() + supervision.host_grace_s + supervision.drain_s
            except (HostFailed, TimeoutError, ValueError):
                # ValueError: the answer cannot be read.
                contact.kill()
                await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                await contact.close()

    def _is_gone(self, member: AgentHandle) -> bool:
        """Whether the member's guard has ended, and with it everything on that host."""
        return member.exit_code is not None and not member.contact.is_lost(member.exit_code)

    async def _confirm_ended(self, member: AgentHandle) -> None:
        """Connect again to a host whose end is unknown, wait for the end of what is left there, and show the result.

        If the wait is too long, the host kills its agent, but not if the head's connection is lost and no signal came.
        From the head, also takes the record of the run's end.
        """
        member.contact.kill()
        await member.contact.close()
        supervision = self.config.supervision
        patience_s = 0.0 if self._killing else supervision.drain_s + SLACK_S
        # If the head is lost, the run may continue there, unless a signal has ended it.
        kill = bool(self.interrupts.signal) or not self._head.lost
        # The host waits up to ``patience_s`` for processes to end, and as long again if it kills some.
        within_s = min(CONFIRM_S, supervision.start_timeout_s) + 2 * patience_s
        self.progress.say(f"{member.host}: looking whether anything is left there")
        try:
            answer = await self._ask_again(member, within_s, patience_s=patience_s, kill=kill)
        except (HostFailed, TimeoutError) as error:
            self.progress.warn(
                [
                    f"{member.host}: cannot be asked whether anything is left there ({_reason(error)}); its agent ends "
                    f"by itself {supervision.host_grace_s:g} s (supervision.host_grace_s) after it has heard the last "
                    "of the run"
                ]
            )
        else:
            if member is self._head and member.ended is None:
                member.ended = answer.ended
            what = "its part of the run lives on" if answer.living else "nothing is left there"
            self.progress.say(f"{member.host}: {what}" + (", after its agent was killed" if answer.killed else ""))

    async def _ask_again(self, member: AgentHandle, within_s: float, **order: Any) -> HostEnded:
        """Send the member's host an EndOrder over a new connection, and return its answer within ``within_s`` seconds.

        ``order`` are fields of the EndOrder. Raises TimeoutError or HostFailed, also if the answer cannot be read.
        """
        contact = Contact(member.host, member.contact.start)
        try:
            async with asyncio.timeout(within_s):
                await contact.reach()
                return await contact.ask(self._order(member, **order), HostEnded)
        except (HostFailed, TimeoutError, ValueError) as error:
            contact.kill()
            if isinstance(error, ValueError):
                raise HostFailed(member.host, str(error)) from error
            raise
        finally:
            await contact.close()

    def _order(self, member: AgentHandle, **order: Any) -> EndOrder:
        """Return the EndOrder for a member's host, with the further fields ``order``."""
        return EndOrder(run_dir=str(self.folder.path), index=member.index, log_dir=str(self.folder.logs), **order)

    def _result(self) -> EndedEvent:
        """Return how the run ended: an agent's failure, else the head's report, else another agent's.

        The head's report wins over a failure if it is "done" or "failed", or if the user preempted the run.
        """
        head = self._head.ended
        user_preempted = self.interrupts.signal and head is not None and head.result == "preempted"
        # ``_fail`` has made the head stop, so its report does not name the failure.
        if (
            self._failure is not None
            and (head is None or head.result in ("stopped", "preempted"))
            and not user_preempted
        ):
            return self._failure
        if head is not None:
            return head
        if self._reported_end is not None:
            return self._reported_end
        reason = f"its connection was lost; its end is recorded in {self.folder.path} on {self._head.host}"
        return EndedEvent(result="failed", actor=self._head.name, reason=reason, exit_code=1)

    def _with_signal(self, ended: EndedEvent) -> EndedEvent:
        """Return the end with the user's signal, if one caused it: in the reason, and in a stopped run's exit code."""
        if ended.result not in ("stopped", "preempted") or not self.interrupts.signal:
            return ended
        if ended.reason == AT_ONCE:
            ended = msgspec.structs.replace(ended, reason=self.interrupts.describe_end_at_once())
        if ended.result == "stopped":
            ended = msgspec.structs.replace(ended, exit_code=128 + self.interrupts.signal)
        return ended


def _reason(error: HostFailed | TimeoutError) -> str:
    return error.reason if isinstance(error, HostFailed) else "no answer"

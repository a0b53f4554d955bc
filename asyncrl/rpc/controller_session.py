"""An actor's session with the controller: registers it, follows the state of the run, sends notices and its trace.

Invariant: an actor registers with a new controller before it acts on the state from that controller. It only learns
new members before. It ends when its role is drained, when it leaves, or when a controller refuses it. It handles a
preemption once. The actor keeps working while the controller is away: a successor comes up at the same address, or the
node agent ends the actor.

A notice is a text for the user (Actor.notify). If it changes before it is sent, only its newest form is sent. There are
at most MOST_KEYS notices. The last of them, with the key MORE, counts all further keys. A notice belongs to an
incarnation of its actor, and the wait that it reports ends with that incarnation
(controller/observation/recent_lines.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncrl.core.errors import DeadlineExceeded, RemoteError, WireError
from asyncrl.messages.actors import LONGEST_KEY, LONGEST_NOTICE, Notice, Register, RunState, WatchRun
from asyncrl.messages.hosts import WatchMembers
from asyncrl.messages.monitor import TracePart
from asyncrl.rpc.calls.retry import is_refusal, log_and_pause
from asyncrl.rpc.lifecycle.roster import CONTROLLER
from asyncrl.rpc.wire.codec import encodable

if TYPE_CHECKING:
    from asyncrl.rpc.actor import Actor

REPORT_S = 5.0
"""Longest time that an actor spends at its end on the report of a failure, or on its notices."""
MOST_KEYS = 64
MORE = "more"
MOST_OVERFLOWING = 1024
"""Largest number of keys that the notice MORE counts."""
NOTICE_PACE_S = 1.0
"""Pause between two reports of notices."""
TRACE_S = 3.0
"""Longest time that an actor spends on sending its spans."""


class NoticeQueue:
    """The newest notice of each key of one actor, and the keys that are still to be sent. Pure."""

    def __init__(self) -> None:
        self._known: dict[str, Notice] = {}
        """Newest notice of each key."""
        self._unsent: dict[str, None] = {}
        """Keys of notices to send, the oldest first."""
        self._overflowing: set[str] = set()
        """Keys that had no room; the notice MORE counts them."""

    def add(self, notice: Notice) -> bool:
        """Queue a notice. Returns whether its text differs from the last one with its key.

        Without room for its key, queues the notice MORE instead, and returns whether MORE did not count the key before.
        """
        key, text = notice.key, notice.text
        # One place is reserved for MORE.
        if key not in self._known and len(self._known) >= MOST_KEYS - 1:
            is_new = key not in self._overflowing
            if is_new and len(self._overflowing) < MOST_OVERFLOWING:
                self._overflowing.add(key)
            self._put(
                Notice(
                    key=MORE,
                    text="more kinds of notices than are shown; the log has them",
                    count=len(self._overflowing),
                )
            )
            return is_new
        known = self._known.get(key)
        self._put(notice)
        return known is None or known.text != text

    def _put(self, notice: Notice) -> None:
        """Store a notice under its key, and queue it if it differs from the stored one."""
        if notice != self._known.get(notice.key):
            self._known[notice.key] = notice
            self._unsent.setdefault(notice.key)

    def take(self) -> list[Notice]:
        """Returns the notices to send, and marks them as sent."""
        taken = [self._known[key] for key in self._unsent]
        self._unsent.clear()
        return taken

    def repeat_waits(self) -> None:
        """Queue the notices that report a wait again, for a new controller, which does not know them."""
        for notice in self._known.values():
            if notice.waits_for:
                self._unsent.setdefault(notice.key)

    def put_back(self, notices: list[Notice]) -> None:
        """Queue again the notices that could not be sent."""
        for notice in notices:
            self._unsent.setdefault(notice.key)


def sendable(key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "", of: str = "") -> Notice:
    """Makes a notice that the wire accepts: cuts long texts, and escapes bytes that are no text, as in a path."""
    return Notice(
        key=_cut(key, LONGEST_KEY),
        text=_cut(text, LONGEST_NOTICE),
        count=count,
        meanwhile=_cut(meanwhile, LONGEST_NOTICE),
        waits_for=_cut(waits_for, LONGEST_KEY),
        of=_cut(of, LONGEST_KEY),
    )


def _cut(text: str, longest: int) -> str:
    return encodable(text)[:longest]


class ControllerSession:
    """The session of one actor; see the module."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.notices = NoticeQueue()
        self.noticed = asyncio.Event()
        """Set when there are notices to send."""
        self._registered_with = 0
        """Incarnation of the controller that the actor last registered with."""
        self._is_preempted = False
        self._is_leaving = False
        self._last_trace = 0
        """Id (RunState.trace) of the last trace request that the actor has answered; 0 before the first."""

    async def register(self, address: str) -> None:
        """Register the actor with the controller. While ``address`` is empty, no other actor can call it."""
        actor = self._actor
        if address and actor.context.credentials.curve:
            # The attempt says which of this actor's keys the server has (wire/zeromq.py).
            address = f"{address}#{actor.context.attempt}"
        # Long enough for a controller that is itself being restarted.
        timeout = actor.config.supervision.start_timeout_s
        call = actor.peer(CONTROLLER).call(Register(record=actor.record(address)), timeout=timeout)
        await call
        self._registered_with = call.answered_by
        # A new controller has none of the earlier values.
        actor.heartbeat_delta.forget()

    async def learn_members(self, timeout: float | None = None) -> None:
        """Ask the controller for the present members of the run, and admit exactly those."""
        self._actor.take_in(await self._actor.peer(CONTROLLER).call(WatchMembers(), timeout=timeout))

    async def run(self) -> None:
        """Follow the run's state for the whole life of the actor, in a loop of parked WatchRun calls.

        On each new state: learn new members, register again with a new controller, ignore dead actors, and send the
        trace if it is asked for. Then let the actor drain, handle a preemption or leave. A failed call is made again
        after a pause. Raises RemoteError or Refused if a controller refuses this incarnation.
        """
        actor = self._actor
        while True:
            call = actor.peer(CONTROLLER).call(WatchRun(seen=actor.run_state.number, members=actor.roster.number))
            try:
                with actor.awaits.on(CONTROLLER, "WatchRun", idle=True):
                    state: RunState = await call
                # The state names a newer revision of the members. Learn it before the state is stored: if that fails,
                # the next call asks for the same state again.
                if state.members > actor.roster.number:
                    await self.learn_members()
            except (DeadlineExceeded, RemoteError) as error:
                await log_and_pause(actor.log, "controller", error)
                continue
            if call.answered_by != self._registered_with:
                actor.log.info("controller has started again", incarnation=call.answered_by)
                try:
                    await self.register(actor.address if actor.ready else "")
                except (DeadlineExceeded, RemoteError) as error:
                    # A controller that refuses has replaced or condemned this incarnation, which must end.
                    if is_refusal(error):
                        raise
                    await log_and_pause(actor.log, "controller", error)
                    continue
                self.notices.repeat_waits()
                self.noticed.set()
            actor.run_state = state
            actor.fence(state.dead)
            if state.trace and state.trace != self._last_trace:
                self._last_trace = state.trace
                actor.tasks.create_task(self.send_trace(state.trace))
            if actor.role in state.draining and not actor.draining:
                actor.log.info("draining", reason=state.reason)
                actor.begin_drain()
            self.preempt()
            self._leave()

    def preempt(self) -> None:
        """Let the actor handle a preemption of the run, once, when it is ready."""
        if self._actor.run_state.phase == "preempting" and self._actor.ready and not self._is_preempted:
            self._is_preempted = True
            self._actor.log.info("the run is preempted")
            self._actor.preempted()

    def _leave(self) -> None:
        """Let the actor leave, once, if the state of the run names it. An actor that is not ready just ends."""
        actor = self._actor
        order = next((leaving for leaving in actor.run_state.leaving if leaving.name == actor.name), None)
        if order is None or self._is_leaving or actor.draining:
            return
        self._is_leaving = True
        actor.log.info("leaving the run", within_s=order.within_s)
        if actor.ready:
            actor.asked_to_leave(order.within_s)
        else:
            actor.begin_drain()

    async def send_trace(self, number: int) -> None:
        """Send the kept spans to the controller, for the trace ``number``; 0 at the end. A failure is logged only.

        Does nothing without a timeline, and in the controller itself.
        """
        actor = self._actor
        # Only a node agent is never restarted, and it has no timeline.
        if not actor.trace.on or actor.context.controller is None or not actor.is_restarted:
            return
        controller = actor.peer(CONTROLLER)
        try:
            async with asyncio.timeout(TRACE_S):
                for spans in actor.trace.parts():
                    await controller.call(TracePart(number=number, spans=spans), timeout=TRACE_S)
                await controller.call(TracePart(number=number, spans=[], last=True), timeout=TRACE_S)
        except (TimeoutError, WireError) as error:
            actor.log.warning("the trace is not sent", error=str(error) or f"no answer within {TRACE_S:g} s")

    async def send_notices(self) -> None:
        """Send queued notices, at most every NOTICE_PACE_S, for the whole life of the actor."""
        while True:
            await self.noticed.wait()
            self.noticed.clear()
            await self._send_waiting_notices()
            await asyncio.sleep(NOTICE_PACE_S)

    async def _send_waiting_notices(self) -> None:
        """Send the queued notices one by one. If the controller is away, queue the rest again and set ``noticed``."""
        actor = self._actor
        unsent = self.notices.take()
        try:
            while unsent:
                await actor.peer(CONTROLLER).call(unsent[0])
                del unsent[0]
        # A WireError is an OSError.
        except OSError as error:
            actor.log.info("controller is away", error=str(error))
            self.noticed.set()
        finally:
            self.notices.put_back(unsent)

    async def send_last_notices(self) -> None:
        """Send the rest of the notices at the end of the actor, within REPORT_S."""
        if self._actor.context.controller is None:
            return
        try:
            async with asyncio.timeout(REPORT_S):
                await self._send_waiting_notices()
        except OSError as error:
            self._actor.log.warning("notices are not sent", error=str(error) or f"no answer within {REPORT_S:g} s")

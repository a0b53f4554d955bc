"""A node agent's connection to the controller: it follows the run's state and sends the agent's reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import DeadlineExceeded, Refused, RemoteError, WireError
from asyncrl.launcher.common.agent_messages import AgentSpec, agent_name, private_name
from asyncrl.messages import Request
from asyncrl.messages.actors import RunState, WatchRun
from asyncrl.messages.hosts import HostLeft
from asyncrl.rpc.actor import CONTROLLER, Actor, ActorContext
from asyncrl.rpc.calls.retry import AWAY_S, log_away
from asyncrl.rpc.wire.keys import load_credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport

SILENCE_SHARE = 0.5
"""Longest deadline of a WatchRun, as a share of the shorter of supervision.silence_s and host_lost_s."""


class AgentLink(Actor):
    """The agent as an actor: passes the run's state in each answer of the controller to ``on_state``, until cancelled.

    A state may come twice, and an older one may be skipped. On the head the states carry every line of metrics once.
    ``on_silent`` is called when the controller does not answer in time. For the first answer of a restarted controller,
    which has a new incarnation, ``on_successor`` is called in place of ``on_state``.
    """

    role = "agent"
    is_restarted = False

    def __init__(
        self,
        context: ActorContext,
        *,
        on_state: Callable[[RunState], None],
        on_silent: Callable[[], None],
        on_successor: Callable[[], None],
    ) -> None:
        super().__init__(context)
        self._on_state, self._on_silent, self._on_successor = on_state, on_silent, on_successor
        self.controller = 0
        """Incarnation of the controller that answered last; 0 before the first answer."""

    async def run(self) -> None:
        """Request the run's state again and again, until cancelled. After an error, pause for AWAY_S."""
        # 0 asks for all lines of metrics, -1 for none: only the head's agent passes metrics on.
        before_first_line = 0 if self.context.index == 0 else -1
        # -1: the agent has no state, so the controller answers at once.
        seen, seen_line = -1, before_first_line
        # A live controller answers within this time even without news, so a missing answer shows its silence early.
        supervision = self.config.supervision
        limit_s = min(supervision.silence_s, supervision.host_lost_s)
        timeout_s = min(self.config.network.call_timeout_s, SILENCE_SHARE * limit_s)
        while True:
            call = self.peer(CONTROLLER).call(WatchRun(seen=seen, seen_line=seen_line), timeout=timeout_s)
            try:
                state: RunState = await call
            except (DeadlineExceeded, RemoteError) as error:
                log_away(self.log, "controller", error)
                if isinstance(error, DeadlineExceeded):
                    self._on_silent()
                await asyncio.sleep(AWAY_S)
                continue
            previous, self.controller = self.controller, call.answered_by
            if previous not in (0, self.controller):
                self._on_successor()
                # The successor counts its lines from 1 again.
                seen, seen_line = -1, before_first_line
                continue
            seen = state.number
            seen_line = -1 if before_first_line < 0 else state.last_line
            self._on_state(state)

    async def report(self, message: Request, timeout: float | None = None) -> Any:
        """Send a report and return the controller's reply; None if there was an error.

        A report that is lost with the controller is sent again to its successor (AgentState).
        """
        try:
            return await self.peer(CONTROLLER).call(message, timeout=timeout)
        except WireError as error:
            self.log.warning("controller did not take a message", type=type(message).__name__, error=str(error))
            return None

    async def say_farewell(self, timeout: float) -> None:
        """Report that everything on this host has ended.

        Repeats this until it is recorded, for ``timeout`` seconds at most. Gives up at an error that cannot pass.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            try:
                await self.peer(CONTROLLER).call(HostLeft(), timeout=until - loop.time())
                return
            except Refused:
                # The controller refuses a host that has left, so it knows.
                return
            except WireError as error:
                self.log.warning("farewell not heard", error=str(error))
                if not isinstance(error, RemoteError) or not error.retryable:
                    return
            await asyncio.sleep(AWAY_S)


def make_link(
    spec: AgentSpec,
    config: Config,
    controller: str,
    incarnation: int,
    *,
    on_state: Callable[[RunState], None],
    on_silent: Callable[[], None],
    on_successor: Callable[[], None],
) -> AgentLink:
    """Make the link of this host's agent to the controller at this address. The caller runs its ``main``."""
    run_dir, name = Path(spec.run_dir), agent_name(spec.index)
    credentials = load_credentials(run_dir / private_name(spec.index), name, 0)
    context = ActorContext(
        config=config,
        name=name,
        incarnation=incarnation,
        run_dir=run_dir,
        transport=ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes),
        credentials=credentials,
        controller=controller,
        bind_host=spec.host,
    )
    link = AgentLink(context, on_state=on_state, on_silent=on_silent, on_successor=on_successor)
    link.facts = {"actors": list(spec.actors), "host": spec.name}
    return link

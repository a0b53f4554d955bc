"""The node agent's end of the wire: it follows the run's state and reports the ends of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import DeadlineExceeded, RemoteError, WireError
from asyncrl.messages import ActorEnded, RunState, StopRun, WatchRun
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext
from asyncrl.runtime.endpoint import new_incarnation
from asyncrl.wire.keys import load_credentials
from asyncrl.wire.zeromq import ZmqTransport

NAME = "agent/0"
ASK_STOP_S = 2.0
RETRY_S = 0.5


class ControllerLink(Actor):
    """Hands each state to ``on_state``, in order and with every line of metrics once, until cancelled."""

    role = "agent"

    def __init__(self, context: ActorContext, on_state: Callable[[RunState], None]) -> None:
        super().__init__(context)
        self._on_state = on_state

    async def run(self) -> None:
        """Follow the run."""
        seen, seen_line = -1, 0
        while True:
            try:
                state: RunState = await self.peer(CONTROLLER).call(WatchRun(seen=seen, seen_line=seen_line))
            except (DeadlineExceeded, RemoteError) as error:
                self.log.warning("controller is away", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            seen, seen_line = state.number, state.last_line
            self._on_state(state)

    async def report(self, message: ActorEnded) -> None:
        """Tell of an end; a controller that cannot be told is itself about to be found dead."""
        try:
            await self.peer(CONTROLLER).call(message)
        except WireError as error:
            self.log.warning("end not reported", actor=message.name, error=str(error))

    async def ask_stop(self, reason: str) -> bool:
        """Ask for an end in good order; False if the controller does not answer."""
        try:
            await self.peer(CONTROLLER).call(StopRun(reason=reason), timeout=ASK_STOP_S)
        except WireError as error:
            self.log.warning("stop not answered", error=str(error))
            return False
        return True


def make_link(config: Config, run_dir: Path, controller: str, on_state: Callable[[RunState], None]) -> ControllerLink:
    """A link to the controller at this address; its ``main`` is yet to be run."""
    credentials = load_credentials(run_dir / "private", NAME, 0)
    transport = ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes)
    context = ActorContext(
        config=config,
        name=NAME,
        incarnation=new_incarnation(),
        run_dir=run_dir,
        transport=transport,
        credentials=credentials,
        controller=controller,
    )
    return ControllerLink(context, on_state)

"""The process on the other side of the benchmarks of calls and of weights: ``python -m tools.bench.served WHAT``.

It runs one real actor without a controller on the event loop of every actor, and raw pyzmq servers for the same work on
the same loop. WHAT, a JSON object, names the actor and the secret. Its first line of stdout has the bound addresses. It
ends when stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from asyncrl.config.load import config_from_json
from asyncrl.messages import ANYBODY, Done, Message, Request
from asyncrl.observe.logging import configure_logging
from asyncrl.parameter_server.actor import ParameterServer
from asyncrl.reward.actor import RewardActor
from asyncrl.rpc.actor import Actor, Caller, handler
from asyncrl.rpc.process import tune_memory
from asyncrl.rpc.wire.keys import Credentials
from tools.bench.processes import actor_context, live

RUN_ID = "bench"


class Echoed(Message, frozen=True, kw_only=True):
    """The number of an Echo."""

    n: int


class Echo(Request, frozen=True, kw_only=True):
    """A small call, answered from the receive callback."""

    reply = Echoed
    senders = ANYBODY
    n: int


class EchoTask(Request, frozen=True, kw_only=True):
    """A small call, answered by a task."""

    reply = Echoed
    senders = ANYBODY
    n: int


class Blob(Request, frozen=True, kw_only=True):
    """A large call."""

    reply = Done
    senders = ANYBODY
    data: np.ndarray


class EchoActor(Actor):
    """Answers small calls with their number and large ones with no more than that they came."""

    role = "echo"
    is_restarted = False

    @handler
    def echo(self, request: Echo, caller: Caller) -> Echoed:
        """Answer as most calls between actors are served."""
        return Echoed(n=request.n)

    @handler
    async def echo_task(self, request: EchoTask, caller: Caller) -> Echoed:
        """Answer as calls are served that may have to wait."""
        return Echoed(n=request.n)

    @handler
    def blob(self, request: Blob, caller: Caller) -> Done:
        """The array is a view of what was received."""
        assert request.data.dtype == np.uint8
        return Done()


def same(*, completion: str, row: dict[str, Any]) -> float:
    """A reward function: 1 if the completion is the row's answer. Ray's side runs the same (ray_side.py)."""
    answer: str = row["answer"]
    return float(completion.strip() == answer.strip())


ACTORS: dict[str, type[Actor]] = {
    "echo": EchoActor,
    "reward": RewardActor,
    "parameter_server": ParameterServer,
}


async def raw_echo(router: Any, *, copy: bool) -> None:
    """Answer each message with its first two frames."""
    while True:
        identity, header, body, *_ = await router.recv_multipart(copy=copy)
        await router.send_multipart([identity, header, body], copy=copy)


async def serve(role: str, secret: str, config: str) -> None:
    """Live as this actor until stdin ends."""
    settings = config_from_json(config)
    context = zmq.asyncio.Context()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        actor = ACTORS[role](actor_context(settings, f"{role}/0", Path(folder), Credentials(RUN_ID, secret)))
        addresses: dict[str, str] = {}
        async with asyncio.TaskGroup() as tasks:
            echoes = []
            for name, copy in (("raw", True), ("raw_views", False)):
                router = context.socket(zmq.ROUTER)
                router.linger = 0
                addresses[name] = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
                echoes.append(tasks.create_task(raw_echo(router, copy=copy)))
            await live(actor, lambda: {"actor": actor.address, **addresses})
            for echo in echoes:
                echo.cancel()
        context.destroy(linger=0)


def main() -> None:
    configure_logging("warning")
    tune_memory()
    uvloop.run(serve(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    # Under its importable name, so that both sides have the same message classes.
    from tools.bench import served

    served.main()

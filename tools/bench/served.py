"""The process on the other side of the benchmarks of calls and of weights: ``python -m tools.bench.served``.

It runs one real actor without a controller on the event loop of every actor, and raw pyzmq servers for the same work on
the same loop. Its first line of stdin names the actor and the secret. Its first line of stdout has the bound addresses.
It ends when stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
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
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.process import tune_memory
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport

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
    loop = asyncio.get_running_loop()
    settings = config_from_json(config)
    credentials = Credentials(RUN_ID, secret)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        actor = ACTORS[role](
            ActorContext(
                config=settings,
                name=f"{role}/0",
                incarnation=1,
                run_dir=Path(folder),
                transport=ZmqTransport(credentials, max_message_bytes=settings.network.max_message_bytes),
                credentials=credentials,
                controller=None,
            )
        )
        loop.add_reader(0, _at_end_of_stdin, actor.begin_drain)
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(actor.main())
            context = zmq.asyncio.Context()
            addresses: dict[str, str] = {}
            echoes = []
            for name, copy in (("raw", True), ("raw_views", False)):
                router = context.socket(zmq.ROUTER)
                router.linger = 0
                addresses[name] = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
                echoes.append(tasks.create_task(raw_echo(router, copy=copy)))
            while not actor.ready and not life.done():  # noqa: ASYNC110 - an actor has no event for this
                await asyncio.sleep(0.01)
            sys.stdout.write(json.dumps({"actor": actor.address, **addresses}) + "\n")
            sys.stdout.flush()
            await life
            for echo in echoes:
                echo.cancel()
        context.destroy(linger=0)


def _at_end_of_stdin(end: Callable[[], None]) -> None:
    if not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        end()


def main() -> None:
    # Without a buffer, so that the end of stdin is left for the loop to see.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        first = json.loads(stdin.readline())
    configure_logging("warning")
    tune_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(first["role"], first["secret"], first["config"]))


if __name__ == "__main__":
    # Under its importable name, so that both sides have the same message classes.
    from tools.bench import served

    served.main()

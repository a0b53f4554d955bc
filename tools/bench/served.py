"""Both sides of the benchmarks of calls and of weights: asyncrl's runtime and raw pyzmq asyncio.

The process on the other side is ``python -m tools.bench.served WHAT``. It runs one real actor without a controller on
the event loop of every actor, and raw pyzmq servers for the same work on the same loop. WHAT, a JSON object, names the
actor and the secret. Its first line of stdout has the bound addresses. It ends when stdin ends.

``Ours`` and ``Raw`` live in this process, on one event loop. Their methods measure once: they return a median round
trip in s, a rate in calls/s or bytes/s, or the seconds of a job.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from asyncrl.config import Config
from asyncrl.config.load import config_from_json, config_to_json
from asyncrl.messages import ANYBODY, Done, Message, Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.reward import Completion, Score
from asyncrl.observe.logging import configure_logging
from asyncrl.parameter_server.actor import ParameterServer
from asyncrl.reward.actor import RewardActor
from asyncrl.rpc.actor import Actor, Caller, handler
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.process import tune_memory
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport
from tools.bench.processes import actor_context, live, worker

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


@asynccontextmanager
async def server(role: str, config: Config) -> AsyncIterator[tuple[dict[str, str], str]]:
    """A server process; gives its addresses and its secret. Raises ActorFailed if it does not come up."""
    secret = secrets.token_hex(16)
    what = json.dumps({"role": role, "secret": secret, "config": config_to_json(config)})
    async with worker(f"{role}/0", [sys.executable, "-m", "tools.bench.served", what]) as process:
        yield await process.answer(), secret


class Ours:
    """asyncrl's runtime, of the actor ``name``, whose role may send what is called for."""

    def __init__(self, address: str, secret: str, peer: str, config: Config, *, name: str) -> None:
        credentials = Credentials(RUN_ID, secret)
        self._transport = ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes)
        endpoint = Endpoint(
            name=name,
            incarnation=1,
            credentials=credentials,
            transport=self._transport,
            call_timeout_s=config.network.call_timeout_s,
            max_message_bytes=config.network.max_message_bytes,
        )
        self._peer = Peer(endpoint, peer, ActorRecord(name=peer, incarnation=1, address=address))

    def close(self) -> None:
        self._peer.close()
        self._transport.close()

    @property
    def call(self) -> Callable[..., asyncio.Future[Any]]:
        return self._peer.call

    async def round_trip(self, calls: int, kind: type[Echo | EchoTask] = Echo) -> float:
        """Median of ``calls`` round trips, one after the other (s)."""
        call, clock, times = self._peer.call, time.perf_counter, []
        for n in range(calls):
            began = clock()
            await call(kind(n=n))
            times.append(clock() - began)
        return statistics.median(times)

    async def pipelined(self, calls: int) -> float:
        """Calls a second with ``calls`` in flight at once."""
        began = time.perf_counter()
        flying = [self._peer.call(Echo(n=n)) for n in range(calls)]
        answers = [await call for call in flying]
        seconds = time.perf_counter() - began
        assert [answer.n for answer in answers] == list(range(calls))
        return calls / seconds

    async def tasks(self, texts: Sequence[str]) -> float:
        """Seconds until every text is scored; each is a task of its own."""
        began = time.perf_counter()
        flying = [
            self._peer.call(
                Score(
                    uid=f"0-{index}",
                    prompt="",
                    row={"answer": "x"},
                    completions=[Completion(text=text, finish_reason="stop", tokens=len(text))],
                )
            )
            for index, text in enumerate(texts)
        ]
        rewards = [(await call).rewards[0] for call in flying]
        seconds = time.perf_counter() - began
        assert rewards == [0.0] * len(texts)
        return seconds

    async def large(self, data: np.ndarray) -> float:
        """Bytes a second of a call with ``data``."""
        began = time.perf_counter()
        await self._peer.call(Blob(data=data))
        return data.nbytes / (time.perf_counter() - began)


class Raw:
    """pyzmq's asyncio sockets, with as many frames of the same sizes."""

    HEADER, BODY = bytes(36), bytes(4)

    def __init__(self, addresses: dict[str, str]) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets = {name: self._context.socket(zmq.DEALER) for name in ("raw", "raw_views")}
        for name, socket in self._sockets.items():
            socket.linger = 0
            socket.connect(addresses[name])

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def round_trip(self, calls: int) -> float:
        """Median of ``calls`` round trips, one after the other (s)."""
        socket, clock, times = self._sockets["raw"], time.perf_counter, []
        frames = [self.HEADER, self.BODY]
        for _ in range(calls):
            began = clock()
            await socket.send_multipart(frames)
            await socket.recv_multipart()
            times.append(clock() - began)
        return statistics.median(times)

    async def large(self, data: np.ndarray) -> float:
        """Bytes a second of a call with ``data``."""
        socket = self._sockets["raw_views"]
        began = time.perf_counter()
        await socket.send_multipart([self.HEADER, self.BODY, data], copy=False)
        await socket.recv_multipart(copy=False)
        return data.nbytes / (time.perf_counter() - began)


def main() -> None:
    configure_logging("warning")
    tune_memory()
    uvloop.run(serve(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    # Under its importable name, so that both sides have the same message classes.
    from tools.bench import served

    served.main()

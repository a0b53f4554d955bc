"""The sides of the benchmark of calls that live in this process: asyncrl's runtime and raw pyzmq asyncio.

Both talk to the same server process (served.py) from the same event loop. A side's methods measure once: they
return a median round trip in s, a rate in calls/s or bytes/s, or the seconds of a job.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.reward import Completion, Score
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport
from tools.bench.processes import worker
from tools.bench.served import RUN_ID, Blob, Echo, EchoTask


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

"""Actors of a test, on real sockets or in memory, with a registry in place of the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.messages.actors import ActorRecord
from asyncrl.observe.catalogue import Counters
from asyncrl.rpc.actor import ActorContext
from asyncrl.rpc.calls import connection
from asyncrl.rpc.calls import peer as peer_module
from asyncrl.rpc.calls.endpoint import Endpoint, EndpointOwner
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.calls.server import CallServer
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.transport import Transport
from asyncrl.rpc.wire.zeromq import ZmqTransport
from tools.memory_transport import MemoryNetwork

RUN_ID, SECRET = "run-1", "s3cret"


class Net:
    """A few endpoints that know one another. Use as an async context manager."""

    def __init__(self, *, memory: bool = False, credentials: Callable[[str], Credentials] | None = None) -> None:
        self.records: dict[str, ActorRecord] = {}
        self.endpoints: list[Endpoint] = []
        self.servers: list[CallServer] = []
        self.peers: list[Peer] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.replaced: list[tuple[str, int]] = []
        self._network = MemoryNetwork() if memory else None
        self._credentials = credentials or (lambda _name: Credentials(RUN_ID, SECRET))
        self._registered = asyncio.Event()
        self._spawned: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Net:
        self.tasks = asyncio.TaskGroup()
        await self.tasks.__aenter__()
        return self

    async def __aexit__(self, *_exc: Any) -> None:
        for peer in self.peers:
            peer.close()
        for server in self.servers:
            server.close()
        for endpoint in self.endpoints:
            endpoint.transport.close()
        for task in self._spawned:
            task.cancel()
        await self.tasks.__aexit__(None, None, None)

    def endpoint(self, name: str, incarnation: int = 1, **changes: Any) -> Endpoint:
        credentials = self._credentials(name)
        transport: Transport = changes.pop("transport", None) or self._transport(credentials)
        if (tap := changes.pop("tap", None)) is not None:
            transport = tap.around(transport)
        endpoint = Endpoint(
            name=name,
            incarnation=incarnation,
            credentials=changes.pop("credentials", credentials),
            transport=transport,
            call_timeout_s=changes.pop("call_timeout_s", 10.0),
            max_message_bytes=changes.pop("max_message_bytes", 1 << 30),
            owner=NetOwner(self),
            **changes,
        )
        self.endpoints.append(endpoint)
        return endpoint

    def _transport(self, credentials: Credentials) -> Transport:
        if self._network is not None:
            return self._network.transport()
        return ZmqTransport(credentials, max_message_bytes=1 << 30)

    def counters(self, name: str) -> Counters:
        """Counters of the newest endpoint of this name."""
        return next(endpoint.counters for endpoint in reversed(self.endpoints) if endpoint.name == name)

    def serve(
        self,
        owner: object,
        name: str,
        incarnation: int = 1,
        *,
        register: bool = True,
        ready: bool = True,
        **changes: Any,
    ) -> CallServer:
        endpoint = self.endpoint(name, incarnation, **changes)
        endpoint.owner.ready = ready
        server = CallServer(endpoint, (owner,))
        address = server.bind("memory:0" if self._network else "tcp://127.0.0.1:0")
        self.servers.append(server)
        if register:
            self.register(ActorRecord(name=name, incarnation=incarnation, address=address))
        server.address = address  # type: ignore[attr-defined]
        return server

    def register(self, record: ActorRecord) -> None:
        self.records[record.name] = record
        self._registered.set()
        self._registered = asyncio.Event()

    def peer(self, endpoint: Endpoint, name: str) -> Peer:
        peer = Peer(endpoint, name)
        self.peers.append(peer)
        return peer

    def client(self, server: str, name: str = "client/0", incarnation: int = 1, **changes: Any) -> Peer:
        return self.peer(self.endpoint(name, incarnation, **changes), server)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.tasks.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def resolve(self, name: str, above: int) -> ActorRecord | None:
        while True:
            record = self.records.get(name)
            if record is not None and record.incarnation > above:
                return record
            await self._registered.wait()


class NetOwner(EndpointOwner):
    """The owner of one endpoint of a net."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._net.spawn(work)

    async def resolve_peer(self, name: str, above: int) -> ActorRecord | None:
        return await self._net.resolve(name, above)

    def note_death(self, name: str, incarnation: int) -> None:
        self._net.replaced.append((name, incarnation))

    def handler_failed(self, type: str, error: BaseException) -> None:
        self._net.errors.append((type, error))


def actor_context(
    config: Config,
    name: str,
    run_dir: Path,
    *,
    credentials: Credentials | None = None,
    transport: Transport | None = None,
    **more: Any,
) -> ActorContext:
    """What an actor is made of: its first incarnation and a real socket. By default there is no controller."""
    credentials = credentials or Credentials(RUN_ID, SECRET)
    return ActorContext(
        config=config,
        name=name,
        run_dir=run_dir,
        credentials=credentials,
        transport=transport or ZmqTransport(credentials, max_message_bytes=1 << 30),
        **{"incarnation": 1, "controller": None, **more},
    )


def repeat_after(monkeypatch: Any, seconds: float) -> None:
    """Have calls without an answer asked after so late, and HELLO repeated after a fifth of that."""
    monkeypatch.setattr(peer_module, "REPEAT_S", seconds)
    monkeypatch.setattr(connection, "HELLO_S", seconds / 5)


def replace(struct: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(struct, **changes)


async def until(condition: Callable[[], Any], what: str = "that it is so", within_s: float = 20.0) -> None:
    """Wait for a condition, checked repeatedly. Raises AssertionError."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        await asyncio.sleep(0.005)

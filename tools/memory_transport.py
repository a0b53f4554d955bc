"""Transport within one process and event loop, so that whole systems run inside one test on any clock.

Same promises as the ZeroMQ transport: frames pass the codec, a message to a closed server vanishes, and a peer
that connects again under the same routing id takes the place of the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.rpc.wire.transport import ClientReceive, Frames, ServerReceive


class MemoryNetwork:
    """The addresses of one process."""

    def __init__(self) -> None:
        self.servers: dict[str, MemoryServer] = {}
        self._next = 1

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)

    def free_address(self) -> str:
        self._next += 1
        return f"memory://{self._next}"


class MemoryTransport:
    """A transport of the addresses of one process."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._open: list[MemoryServer | MemoryClient] = []

    def bind(self, address: str, receive: ServerReceive, turned_away: Callable[[], None]) -> MemoryServer:
        if not address.startswith("memory://") or address.endswith(":0"):
            address = self._network.free_address()
        if address in self._network.servers:
            raise OSError(f"address in use: {address}")
        server = MemoryServer(self._network, address, receive)
        self._network.servers[address] = server
        self._open.append(server)
        return server

    def connect(
        self, address: str, routing_id: bytes, receive: ClientReceive, lost: Callable[[], None], peer: str
    ) -> MemoryClient:
        client = MemoryClient(self._network, address, routing_id, receive, lost)
        self._open.append(client)
        return client

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        """There are no keys here."""

    def close(self) -> None:
        for item in self._open:
            item.close()
        self._open.clear()


class MemoryServer:
    """A server at an address of one process."""

    def __init__(self, network: MemoryNetwork, address: str, receive: ServerReceive) -> None:
        self.address = address
        self._network = network
        self._receive = receive
        self._clients: dict[bytes, MemoryClient] = {}

    def deliver(self, client: MemoryClient, frames: Frames) -> None:
        self._clients[client.routing_id] = client
        self._receive(client.routing_id, frames, None)

    def send(self, routing_id: bytes, frames: Frames) -> bool:
        client = self._clients.get(routing_id)
        if client is not None:
            asyncio.get_running_loop().call_soon(client.deliver, _as_received(frames))
        return True

    def close(self) -> None:
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]
        for client in self._clients.values():
            client.server_gone()
        self._clients.clear()

    def forget(self, routing_id: bytes) -> None:
        self._clients.pop(routing_id, None)


class MemoryClient:
    """A client of a server in the same process."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        routing_id: bytes,
        receive: ClientReceive,
        lost: Callable[[], None],
    ) -> None:
        self.routing_id = routing_id
        self._network, self._address = network, address
        self._receive, self._lost = receive, lost
        self._closed = False

    def send(self, frames: Frames) -> bool:
        asyncio.get_running_loop().call_soon(self._arrive, _as_received(frames))
        return True

    def _arrive(self, frames: Frames) -> None:
        server = self._network.servers.get(self._address)
        if server is not None and not self._closed:
            server.deliver(self, frames)

    def deliver(self, frames: Frames) -> None:
        if not self._closed:
            self._receive(frames)

    def server_gone(self) -> None:
        if not self._closed:
            asyncio.get_running_loop().call_soon(self._lost)

    def close(self) -> None:
        self._closed = True
        server = self._network.servers.get(self._address)
        if server is not None:
            server.forget(self.routing_id)


def _as_received(frames: Frames) -> list[bytes]:
    return [bytes(frame) for frame in frames]

"""A transport with a tap: a test sees each message that passes, and may drop it, keep it, or pass it on later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from asyncrl.rpc.wire.envelope import Header, Kind, decode_header
from asyncrl.rpc.wire.transport import ClientConnection, ClientReceive, Frames, Server, ServerReceive, Transport

Hook = Callable[[Header, Callable[[], object]], object]
"""Called with the header of a message and a function that passes it on."""


def pass_on(_header: Header, go_on: Callable[[], object]) -> None:
    """Pass a message on."""
    go_on()


class Tap:
    """The transport of one endpoint. Its four hooks see the messages of its servers and of its connections."""

    def __init__(self) -> None:
        self.takes: Hook = pass_on
        self.answers: Hook = pass_on
        """Messages that its servers receive and send."""
        self.says: Hook = pass_on
        self.hears: Hook = pass_on
        """Messages that its connections send and receive."""
        self.taken: Counter[str] = Counter()
        """Messages that arrived at its servers, by kind, including dropped ones."""
        self.server: TappedServer
        """The server that was bound last."""

    def around(self, transport: Transport) -> Tap:
        """Put itself around a transport."""
        self._transport = transport
        return self

    def bind(self, address: str, receive: ServerReceive, turned_away: Callable[[], None]) -> TappedServer:
        def take(routing_id: bytes, frames: Frames, owner: str | None) -> None:
            header = decode_header(frames[0])
            self.taken[Kind(header.kind).name] += 1
            self.takes(header, lambda: receive(routing_id, frames, owner))

        self.server = TappedServer(self, self._transport.bind(address, take, turned_away), take)
        return self.server

    def connect(
        self, address: str, routing_id: bytes, receive: ClientReceive, lost: Callable[[], None], peer: str
    ) -> TappedConnection:
        def hear(frames: Frames) -> None:
            self.hears(decode_header(frames[0]), lambda: receive(frames))

        return TappedConnection(self, self._transport.connect(address, routing_id, hear, lost, peer))

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        self._transport.admit(peers)

    def close(self) -> None:
        self._transport.close()


class TappedServer:
    """A bound socket. ``take`` gives its owner a message as if it had come from a peer with this routing id."""

    def __init__(self, tap: Tap, server: Server, take: ServerReceive) -> None:
        self.address, self.take = server.address, take
        self._tap, self._server = tap, server

    def send(self, routing_id: bytes, frames: Frames) -> bool:
        self._tap.answers(decode_header(frames[0]), lambda: self._server.send(routing_id, frames))
        return True

    def close(self) -> None:
        self._server.close()


class TappedConnection:
    """A connection to one server."""

    def __init__(self, tap: Tap, connection: ClientConnection) -> None:
        self._tap, self._connection = tap, connection

    def send(self, frames: Frames) -> bool:
        self._tap.says(decode_header(frames[0]), lambda: self._connection.send(frames))
        return True

    def close(self) -> None:
        self._connection.close()

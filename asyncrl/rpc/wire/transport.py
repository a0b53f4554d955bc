"""The interface of the transports that carry frames.

A transport delivers each message whole or not at all, in order on a connection while that lives, at most once.
It never blocks and never waits: a message that cannot go now is not sent, and a caller that needs an answer repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Frames = Sequence[Any]
"""Header and body as bytes, then buffers as bytes or objects with ``.buffer``."""

ServerReceive = Callable[[bytes, Frames, str | None], None]
"""(routing id, frames, owner of the peer's key or None without CURVE)."""

ClientReceive = Callable[[Frames], None]


class Server(Protocol):
    """A bound socket that many peers connect to."""

    address: str

    def send(self, routing_id: bytes, frames: Frames) -> bool:
        """Hand a message to the transport; False if that peer cannot take more now. One that is gone gets nothing."""

    def close(self) -> None:
        """Unbind; what is not sent is dropped."""


class ClientConnection(Protocol):
    """A connection to one server."""

    def send(self, frames: Frames) -> bool:
        """Hand a message to the transport; False if it cannot take more now."""

    def close(self) -> None:
        """Disconnect; what is not sent is dropped."""


class Transport(Protocol):
    """Makes servers and clients. All callbacks come on the event loop that called."""

    def bind(self, address: str, receive: ServerReceive, turned_away: Callable[[], None]) -> Server:
        """Bind; a port of 0 is replaced in ``Server.address`` by the real one.

        ``turned_away`` is called for each connection that fails before it is admitted: its key is missing or unknown,
        or it does not follow the transport's protocol.
        """

    def connect(
        self, address: str, routing_id: bytes, receive: ClientReceive, lost: Callable[[], None], peer: str
    ) -> ClientConnection:
        """Connect to the actor ``peer``. ``lost`` is called when the connection breaks; it may come back by itself.

        Raises OSError when there is no descriptor left.
        """

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        """Let exactly these connect and be connected to from here on: public keys by actor name."""

    def close(self) -> None:
        """Close everything that is open."""

"""The interface of the transports that carry frames.

A transport delivers each message at most once, whole or not at all, and in order on each connection. It never blocks
and never waits: a message that cannot be sent now is dropped, and a caller that needs an answer repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Frames = Sequence[Any]
"""Header and body as bytes, then buffers as bytes or objects with ``.buffer``."""

ServerReceive = Callable[[bytes, Frames, str | None], None]
"""Called with (routing id, frames, owner of the peer's key or None without CURVE)."""

ClientReceive = Callable[[Frames], None]


class Server(Protocol):
    """A bound socket that many peers connect to."""

    address: str

    def send(self, routing_id: bytes, frames: Frames) -> bool:
        """Queue a message; False if the queue of that peer is full. A message to a peer that is gone is dropped."""

    def close(self) -> None:
        """Unbind and drop the messages that are not sent yet."""


class ClientConnection(Protocol):
    """A connection to one server."""

    def send(self, frames: Frames) -> bool:
        """Queue a message; False if the queue is full."""

    def close(self) -> None:
        """Disconnect and drop the messages that are not sent yet."""


class Transport(Protocol):
    """Makes servers and clients. Their callbacks run on the event loop in which they were made."""

    def bind(self, address: str, receive: ServerReceive, turned_away: Callable[[], None]) -> Server:
        """Bind a server. ``Server.address`` has the port that was taken.

        ``turned_away`` is called for each connection that fails before it is admitted: its key is missing or unknown,
        or it violates the transport's protocol. A transport that limits new connections also calls it each time that it
        begins to hold them back.
        """

    def connect(
        self, address: str, routing_id: bytes, receive: ClientReceive, lost: Callable[[], None], peer: str
    ) -> ClientConnection:
        """Connect to the actor ``peer``. Raises OSError, for example if no descriptor is left or its key is unknown.

        ``lost`` is called each time the connection breaks. The connection may come back by itself.
        """

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        """From now on accept connections only from these actors, and connect only to them: public keys by name."""

    def close(self) -> None:
        """Close everything that is open."""

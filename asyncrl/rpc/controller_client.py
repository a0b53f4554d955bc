"""Connects to the controller at its fixed address: for heartbeats, for asyncrl-top, and for commands on a live run.

An actor reaches the controller through a ``Peer`` of its own endpoint. Every other connection is a ControllerClient
with an endpoint and a transport of its own. So it works in another thread, or in a process that is no actor. If the
controller is away, the connection comes back with its successor at the same address. Fails as ``Peer`` does.

A controller leaves its address in ``AddressFile``, a JSON object in the run's private folder, for its node agent, for
commands and for its successor. A reader sees a whole file or no file.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.lifecycle.roster import CONTROLLER
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport

ADDRESS_FILE = "controller.json"

Self = TypeVar("Self", bound="ControllerClient")


class ControllerClient:
    """A connection to the controller. Make and use it within one event loop; it is a context manager."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        name: str,
        incarnation: int,
        *,
        call_timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        self._transport = ZmqTransport(credentials, max_message_bytes=max_message_bytes)
        self.endpoint = Endpoint(
            name=name,
            incarnation=incarnation,
            credentials=credentials,
            transport=self._transport,
            call_timeout_s=call_timeout_s,
            max_message_bytes=max_message_bytes,
        )
        self.peer = Peer(self.endpoint, CONTROLLER, ActorRecord(name=CONTROLLER, incarnation=0, address=address))

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect. Blocks for ``linger_s`` at most, until the last messages have left."""
        self._transport.close(linger_s)
        self.peer.close()


class AddressFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file. Only a successor of the controller reads more than ``address``."""

    address: str
    incarnation: int = 0
    hosts: dict[str, tuple[str, list[str], list[str]]] = {}
    """By node agent: the name of its host, the names of the actors there, and further names of the host."""
    began: float = float("inf")
    """Unix time at which the first controller of this attempt of the run started (s)."""
    restarts: int = 0
    """Number of restarts of the controller."""
    newest: dict[str, int] = {}
    """Largest known incarnation of each actor and node agent."""
    generations: dict[str, int] = {}
    """For each rank group, by its role: the oldest generation that is not over (lifecycle/registry.py)."""


def read_address_file(path: Path) -> AddressFile | None:
    """Reads the file that a controller left; None if there is no file. Raises ValueError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not say where the controller is: {error}") from None

"""Connects to the controller at its fixed address: for heartbeats, for asyncrl-top, and for commands on a live run.

An actor reaches the controller through a ``Peer`` of its own endpoint. Every other connection is a ControllerClient
with an endpoint and a transport of its own. So it works in another thread, or in a process that is no actor. If the
controller is away, the connection comes back with its successor at the same address. ``ask`` fails with UsageError,
whose text is for users, or with an OSError, such as DeadlineExceeded.

A controller leaves its address in ``AddressFile``, a JSON object in the run's private folder, for its node agent, for
commands and for its successor. A reader sees a whole file or no file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from asyncrl.core.errors import DeadlineExceeded, ProtocolError, Refused, RemoteError, UsageError
from asyncrl.messages import Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.calls.retry import AWAY_S, is_refusal
from asyncrl.rpc.calls.server import CROWDED
from asyncrl.rpc.lifecycle.roster import CONTROLLER
from asyncrl.rpc.wire.keys import SHARED_INCARNATION, Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport

ADDRESS_FILE = "controller.json"
LARGEST_BYTES = 1 << 28
"""Size of the largest answer (bytes)."""
LOOK_S = 10.0
"""Seconds without an answer after which ``ask`` checks whether the run still lives, and calls again.

For a request that is not idempotent, ``ask`` checks only at the deadline and never calls again."""


class RequestRefused(UsageError):
    """The controller does not carry out a request, or its answer cannot be read."""


class ControllerClient:
    """A connection to the controller. Make and use it within one event loop; it is a context manager.

    ``must_live`` raises UsageError if the run has ended.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        name: str,
        incarnation: int = SHARED_INCARNATION,
        *,
        call_timeout_s: float = 0.0,
        must_live: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = ZmqTransport(credentials, max_message_bytes=LARGEST_BYTES)
        self._address, self._must_live = address, must_live
        self.endpoint = Endpoint(
            name=name,
            incarnation=incarnation,
            credentials=credentials,
            transport=self._transport,
            call_timeout_s=call_timeout_s,
            max_message_bytes=LARGEST_BYTES,
        )
        self.peer = Peer(self.endpoint, CONTROLLER, ActorRecord(name=CONTROLLER, incarnation=0, address=address))

    async def ask(self, request: Request, timeout: float | None = None) -> Any:
        """Send a request and return its reply; repeats a request that was refused only for now.

        ``timeout`` (s), by default ``call_timeout_s``, covers all repeats. Raises RequestRefused, UsageError if the
        controller does not accept the connection or the run has ended, and DeadlineExceeded with the whole time. A
        request that is not idempotent may also end with PeerRestarted.
        """
        loop = asyncio.get_running_loop()
        began, look_s = loop.time(), LOOK_S if request.idempotent else math.inf
        until = began + (self.endpoint.call_timeout_s if timeout is None else timeout)
        while True:
            try:
                return await self.peer.call(request, timeout=min(until - loop.time(), look_s))
            except RemoteError as error:
                if is_refusal(error) or loop.time() + AWAY_S >= until:
                    raise RequestRefused(error.message) from None
                await asyncio.sleep(AWAY_S)
            except ProtocolError as error:
                raise RequestRefused(str(error)) from None
            except Refused as error:
                problem = (
                    f"these keys do not fit the run there ({error.code}: ours {error.ours}, theirs {error.theirs})"
                )
                fix = "each start of a run makes new keys: copy its RUN/private again"
                if error.code == "protocol":
                    problem = f"its asyncrl speaks version {error.theirs} of the protocol, and this one {error.ours}"
                    fix = "use the asyncrl of that run"
                if error.code == CROWDED:
                    problem = f"the run accepts {error.theirs} as {self.endpoint.name}"
                    fix = "end one of them, or wait until one has ended"
                raise UsageError(f"{self._address}: {problem}; {fix}") from None
            except DeadlineExceeded as error:
                self._must_live()
                if loop.time() >= until:
                    waited_s = loop.time() - began
                    raise DeadlineExceeded(error.who, error.peer, error.what, waited_s, error.hint) from None

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect. Blocks for ``linger_s`` at most, until the last messages have left."""
        self._transport.close(linger_s)
        self.peer.close()


class AddressFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ADDRESS_FILE. Only a successor of the controller reads more than ``address``."""

    address: str
    incarnation: int = 0
    hosts: dict[str, tuple[str, list[str], list[str]]] = {}
    """By node agent: the name of its host, the names of the actors there, and further names of the host."""
    began: float = float("inf")
    """Unix time at which the first controller of this attempt of the run started (s)."""
    restarts: int = 0
    """Number of restarts of the controller in this attempt of the run."""
    newest: dict[str, int] = {}
    """Largest known incarnation of each actor and node agent."""
    generations: dict[str, int] = {}
    """For each rank group, by its role: the oldest generation that is not over (rpc/lifecycle/registry.py)."""


def read_address_file(path: Path) -> AddressFile | None:
    """Reads the file that a controller left; None if there is no file. Raises ValueError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not say where the controller is: {error}") from None

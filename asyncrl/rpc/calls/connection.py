"""The connection to one peer: finds the peer, says HELLO until it is answered, and measures how long it is not reached.

A peer has a fixed address, or the controller's registry knows its address. If the connection breaks or HELLO gets no
answer, this says HELLO again with exponential backoff and full jitter. Meanwhile it asks the registry for a successor
of a peer without a fixed address. An actor that learns elsewhere that a peer was replaced calls ``adopt``. From then on
messages of older incarnations are ignored.

The peer is *unreached* from the first attempt to connect, or the loss of the connection, to the next WELCOME. On some
network paths only small packets get through: the WELCOME comes, and then the connection is lost. Such a connection does
not end the time unreached. A connection is *proven* once a reply or an error has come over it, or it has been open for
PROVEN_S.

The subclass (peer.py) sends and receives the messages. Fails with OSError if no connection can be opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from abc import ABC, abstractmethod

from asyncrl.core.errors import DeadlineExceeded, RemoteError
from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.retry import pause
from asyncrl.rpc.wire.envelope import Header, Welcome
from asyncrl.rpc.wire.transport import ClientConnection, Frames

HELLO_S = 1.0
"""Upper end of the first pause before HELLO is said again (s); the pauses grow."""
PROVEN_S = 25.0
"""Age at which an open connection counts as proven even if nothing came over it (s): ZeroMQ ends a half-open connection
sooner."""


class PeerConnection(ABC):
    """The connection to one peer."""

    def __init__(self, endpoint: Endpoint, name: str, record: ActorRecord | None) -> None:
        self.name = name
        self.ready = False
        """Whether the last HELLO was answered and the connection has not broken since."""
        self.welcomes = 0
        """Number of WELCOMEs so far. After each the peer may have lost the messages that were sent before."""
        self.is_fixed = record is not None
        """Whether the peer has a fixed address, where its successors are found too."""
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._record = record
        """Newest known record of the peer; None until the registry has answered."""
        self._client: ClientConnection | None = None
        self._incarnation = 0
        """Incarnation of the peer, from its WELCOME; 0 before the first."""
        self._adopted = 0
        """Messages of incarnations below this one are ignored."""
        self._draws = random.Random(f"{endpoint.name} {endpoint.incarnation} {name}")
        """Random numbers for the lengths of pauses."""
        self._next_id = 1
        self._hello_ids: set[int] = set()
        """Ids of the HELLOs on this connection that are not answered yet."""
        self._hello_timer: asyncio.TimerHandle | None = None
        self._hellos = 0
        """Number of HELLOs since the last WELCOME, or since the connection was opened or lost."""
        self._resolving: asyncio.Task[None] | None = None
        """Task that asks the registry for the peer's address."""
        self._closed = False
        self._reached = asyncio.Event()
        """Set while the peer is ready."""
        self._unreached_since: float | None = None
        """Start of the newest time unreached (s), which a connection that was not proven does not end. None before the
        first, and if no connection is wanted."""
        self._welcomed_at = 0.0
        """Time of the newest WELCOME (s)."""
        self._is_proven = False
        """Whether a reply or an error has come since the newest WELCOME, other than hello_required."""
        self._flaps = False
        """Whether the last connection was lost before it was proven, and no later one of its incarnation is proven."""

    # --- for the subclass ---

    @abstractmethod
    def _receive(self, frames: Frames) -> None:
        """Handle a message from the peer."""

    @abstractmethod
    def _cannot_connect(self, error: OSError) -> None:
        """Fail everything that waits for the connection."""

    # --- opening and closing it ---

    def connect(self) -> None:
        """Open a connection and say HELLO, unless there is one. Without a usable address, ask the registry first.

        Raises OSError if no connection can be opened.
        """
        if self._client is not None or self._closed:
            return
        self._mark_unreached()
        if self._record is None or self._record.incarnation < self._adopted:
            self._look_up()
            return
        endpoint = self._endpoint
        # Random at its end: the server may still have the half-open pipe of an earlier connection under its id.
        routing_id = f"{endpoint.name}/{endpoint.incarnation}/{secrets.token_hex(6)}".encode()
        try:
            self._client = endpoint.transport.connect(
                self._record.address, routing_id, self._receive, self._lost, self.name
            )
        except OSError:
            # The next call connects again, maybe much later; until then the peer does not count as unreached.
            self._unreached_since = None
            raise
        self._hellos = 0
        self._say_hello()

    async def reached(self, within_s: float) -> bool:
        """Wait until the peer is ready, for ``within_s`` at most. Returns whether it is ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._reached.wait()
        return self.ready

    def adopt(self, incarnation: int) -> None:
        """Accept only messages of ``incarnation`` or a newer one from now on. An older one changes nothing.

        Drops a connection to an older incarnation and looks for the new one. peer.py says which calls it gets.
        """
        assert not self.is_fixed, "a peer of a fixed address has no older incarnation elsewhere"
        if incarnation <= self._adopted:
            return
        self._adopted = incarnation
        known = max(self._incarnation, self._record.incarnation if self._record is not None else 0)
        if self._client is not None and known < incarnation:
            self._disconnect()
            self._look_up()

    def close(self) -> None:
        """Disconnect for good."""
        self._closed = True
        self._disconnect()
        if self._resolving is not None:
            self._resolving.cancel()

    @property
    def known(self) -> bool:
        """Whether the peer's address is known."""
        return self._record is not None

    @property
    def incarnation(self) -> int:
        """Incarnation that sent the last WELCOME; 0 before the first."""
        return self._incarnation

    def _disconnect(self) -> None:
        self._mark_unreached()
        self._stop_hello()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _lost(self) -> None:
        """Handle a broken connection: say HELLO in case it comes back by itself, and look for a successor elsewhere."""
        if self._closed:
            return
        self._hellos = 0
        self._say_hello()
        if not self.is_fixed:
            self._look_up()

    # --- HELLO ---

    def _say_hello(self) -> None:
        """Say HELLO, and set the timer that says it again until a WELCOME comes."""
        if self._closed or self._client is None:
            return
        self._mark_unreached()
        if self._hello_ids and not self.is_fixed:
            # An earlier HELLO has no answer: the peer may have a successor elsewhere.
            self._look_up()
        self._hello_ids.add(self._next_id)
        self._client.send(self._endpoint.hello(self._next_id))
        self._next_id += 1
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._hello_timer = self._loop.call_later(pause(HELLO_S, self._hellos, self._draws.random()), self._say_hello)
        self._hellos += 1

    def _stop_hello(self) -> None:
        self._hello_ids.clear()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _take_welcome(self, header: Header, body: Welcome) -> bool:
        """Mark the peer as ready, and return True, if this answers an open HELLO to it; else change nothing."""
        if header.in_reply_to not in self._hello_ids or body.name != self.name:
            return False
        self._stop_hello()
        self._hellos = 0
        self._welcomed_at, self._is_proven = self._loop.time(), False
        # Another incarnation may be reached by another network path, whose quality is not known yet.
        self._flaps = self._flaps and self._incarnation in (0, body.incarnation)
        self._incarnation = body.incarnation
        self.ready = True
        self.welcomes += 1
        self._reached.set()
        return True

    # --- looking the peer up ---

    def _look_up(self) -> None:
        """Start to ask the registry for the peer's address, unless that is under way."""
        if self._resolving is None and not self._closed and not self._endpoint.ending:
            self._resolving = self._endpoint.owner.spawn(self._resolve())

    async def _resolve(self) -> None:
        """Ask the registry until it knows a newer incarnation, and connect to it; stop if the peer is ready again.

        Asks again after a pause while the controller is away. If no connection can be opened, waiting calls fail.
        """
        try:
            while not self._closed and not self.ready:
                # The registry returns an incarnation above ``above``, and the adopted one itself is good enough.
                above = max(self._record.incarnation if self._record is not None else 0, self._adopted - 1)
                try:
                    # Parked by the controller, so that a loop without an answer does not spin.
                    record = await self._endpoint.owner.resolve_peer(self.name, above)
                except (DeadlineExceeded, RemoteError):
                    # The controller is away. The deadlines of the calls limit how long they wait.
                    await asyncio.sleep(HELLO_S / 2)
                    continue
                # Meanwhile the old connection may have come back, or a newer incarnation may have been adopted.
                if record is not None and record.incarnation >= self._adopted and not self.ready:
                    self._record = record
                    self._disconnect()
                    try:
                        self.connect()
                    except OSError as error:
                        self._cannot_connect(error)
                    return
        finally:
            self._resolving = None

    # --- the time without the peer ---

    def _mark_unreached(self) -> None:
        """Note that the peer is not ready, and begin the time unreached unless it has begun."""
        now = self._loop.time()
        if self.ready:
            self._flaps = not self._is_proven and now - self._welcomed_at < PROVEN_S
            # A connection that was never proven did not end the time unreached, so its start stays.
            if not self._flaps:
                self._unreached_since = now
        elif self._unreached_since is None:
            self._unreached_since = now
        self.ready = False
        self._reached.clear()

    def _mark_proven(self) -> None:
        """Note that a reply or an error has come over the connection."""
        self._is_proven, self._flaps = True, False

    @property
    def unreached_s(self) -> float:
        """Seconds for which the peer is unreached. Callable from any thread.

        0 if it is reached, if the registry knows no living incarnation, or if this actor does not try to reach it.
        """
        record, now = self._record, self._loop.time()
        if self._closed or record is None or record.incarnation < self._adopted:
            return 0.0
        # ``_mark_unreached`` writes the time first and ``ready`` last. Read in the other order, the time of an absence
        # that ended long ago could be taken for the present one.
        is_reached = self.ready and (not self._flaps or now - self._welcomed_at >= PROVEN_S)
        missed = self._unreached_since
        return 0.0 if missed is None or is_reached else now - missed

"""The connection to one peer: finds the peer, says HELLO until it is answered, and measures how long it is not reached.

A peer has one address for good, or the registry knows its address. If the connection breaks, or HELLO is not answered,
HELLO is said again with exponential backoff and full jitter, and the registry is asked for a successor meanwhile. An
actor that learns elsewhere that a peer was replaced calls ``adopt``: messages of older incarnations are ignored from
then on.

The time without the peer is that from the first HELLO without an answer, or the loss of the connection, to the next
WELCOME. A connection that is lost again before anything but the WELCOME came over it does not count as reached, as with
a path that lets only small packets through.

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
"""Longest first pause before HELLO is said again."""
PROVEN_S = 25.0
"""Time after which a connection that holds is known to lead to the peer, even if nothing was asked: ZeroMQ ends a
half-open one sooner."""


class PeerConnection(ABC):
    """The connection to one peer."""

    def __init__(self, endpoint: Endpoint, name: str, record: ActorRecord | None) -> None:
        self.name = name
        self.ready = False
        """Whether HELLO is answered."""
        self.welcomes = 0
        """Number of HELLOs that were answered: after another one the peer may know nothing of what was sent before."""
        self.is_fixed = record is not None
        """Whether it has one address for good, so that its successor is found there too."""
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._record = record
        self._client: ClientConnection | None = None
        self._incarnation = 0
        """Incarnation of the peer, from its WELCOME; 0 before the first."""
        self._adopted = 0
        """Incarnation of the peer below which none is believed."""
        self._draws = random.Random(f"{endpoint.name} {endpoint.incarnation} {name}")
        self._next_id = 1
        self._hello_ids: set[int] = set()
        """Ids of the HELLOs on this connection that are not answered yet."""
        self._hello_timer: asyncio.TimerHandle | None = None
        self._hellos = 0
        """HELLOs said since one was answered, or the connection broke, last."""
        self._resolving: asyncio.Task[None] | None = None
        self._closed = False
        self._reached = asyncio.Event()
        """Set while the peer is ready."""
        self._missed: float | None = None
        """Time since which it was not reached, if it was not when it was last asked for (s)."""
        self._welcomed = 0.0
        """Time at which the newest WELCOME came."""
        self._is_proven = False
        """Whether anything else has come since."""
        self._flaps = False
        """Whether the connection before this one was lost with nothing proven."""

    # --- for the subclass ---

    @abstractmethod
    def _receive(self, frames: Frames) -> None:
        """Take in a message of the peer."""

    @abstractmethod
    def _cannot_connect(self, error: OSError) -> None:
        """End everything that waits for the connection."""

    # --- opening and closing it ---

    def connect(self) -> None:
        """Say HELLO, unless that is done already. Raises OSError where no connection can be opened."""
        if self._client is not None or self._closed:
            return
        self._miss()
        if self._record is None or self._record.incarnation < self._adopted:
            self._find()
            return
        endpoint = self._endpoint
        # Random at its end: the server may still have the half-open pipe of an earlier connection under its id.
        routing_id = f"{endpoint.name}/{endpoint.incarnation}/{secrets.token_hex(6)}".encode()
        try:
            self._client = endpoint.transport.connect(
                self._record.address, routing_id, self._receive, self._lost, self.name
            )
        except OSError:
            # The next call tries again, which may be long after this.
            self._missed = None
            raise
        self._hellos = 0
        self._say_hello()

    async def reached(self, within_s: float) -> bool:
        """Wait until the peer is ready, for ``within_s`` at most; whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._reached.wait()
        return self.ready

    def adopt(self, incarnation: int) -> None:
        """Take ``incarnation`` for the living one: what older ones say is not believed from here on.

        A connection to an older one is dropped; calls in flight that may be repeated go to the new one.
        """
        assert not self.is_fixed, "a peer of a fixed address has no older incarnation elsewhere"
        if incarnation <= self._adopted:
            return
        self._adopted = incarnation
        known = max(self._incarnation, self._record.incarnation if self._record is not None else 0)
        if self._client is not None and known < incarnation:
            self._disconnect()
            self._find()

    def close(self) -> None:
        """Disconnect for good."""
        self._closed = True
        self._disconnect()
        if self._resolving is not None:
            self._resolving.cancel()

    @property
    def known(self) -> bool:
        """Whether the registry knows a living actor of this name."""
        return self._record is not None

    @property
    def incarnation(self) -> int:
        """Incarnation that has answered HELLO last; 0 before the first. Calls to an older one have ended."""
        return self._incarnation

    def _disconnect(self) -> None:
        self._miss()
        self._stop_hello()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _lost(self) -> None:
        """The connection broke. It may come back by itself, or the peer may have a successor elsewhere."""
        if self._closed:
            return
        self._hellos = 0
        self._say_hello()
        if not self.is_fixed:
            self._find()

    # --- HELLO ---

    def _say_hello(self) -> None:
        """Say HELLO, and again until it is answered."""
        if self._closed or self._client is None:
            return
        self._miss()
        if self._hello_ids and not self.is_fixed:
            # Not answered so far: the peer may have a successor elsewhere.
            self._find()
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
        """Take in a WELCOME; False if it is the answer to a HELLO on an earlier connection, or a second one."""
        if header.in_reply_to not in self._hello_ids or body.name != self.name:
            return False
        self._stop_hello()
        self._hellos = 0
        self._welcomed, self._is_proven = self._loop.time(), False
        # Another incarnation may be reached by another path, which is not known yet.
        self._flaps = self._flaps and self._incarnation in (0, body.incarnation)
        self._incarnation = body.incarnation
        self.ready = True
        self.welcomes += 1
        self._reached.set()
        return True

    # --- looking the peer up ---

    def _find(self) -> None:
        if self._resolving is None and not self._closed and not self._endpoint.ending:
            self._resolving = self._endpoint.owner.spawn(self._resolve())

    async def _resolve(self) -> None:
        try:
            while not self._closed and not self.ready:
                # A larger one than ``above`` is asked for, and the adopted incarnation itself will do.
                above = max(self._record.incarnation if self._record is not None else 0, self._adopted - 1)
                try:
                    # Parked by the controller, so that a loop without an answer does not spin.
                    record = await self._endpoint.owner.resolve_peer(self.name, above)
                except (DeadlineExceeded, RemoteError):
                    # The controller is away; the callers' own deadlines bound this.
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

    def _miss(self) -> None:
        """The peer is not reached from now on, unless it was not before."""
        now = self._loop.time()
        if self.ready:
            self._flaps = not self._is_proven and now - self._welcomed < PROVEN_S
            # A connection over which nothing came did not end the absence: the time of the first miss stands.
            if not self._flaps:
                self._missed = now
        elif self._missed is None:
            self._missed = now
        self.ready = False
        self._reached.clear()

    def _prove(self) -> None:
        """Something other than a WELCOME has come."""
        self._is_proven, self._flaps = True, False

    @property
    def unreached_s(self) -> float:
        """Seconds for which it was not reached though it is known to live and this actor wants to; 0 if it is.

        Callable from any thread.
        """
        record, now = self._record, self._loop.time()
        if self._closed or record is None or record.incarnation < self._adopted:
            return 0.0
        # ``_miss`` writes the time first and ``ready`` last. Read in the other order, the time of an absence that
        # ended long ago could be taken for the present one.
        is_reached = self.ready and (not self._flaps or now - self._welcomed >= PROVEN_S)
        missed = self._missed
        return 0.0 if missed is None or is_reached else now - missed

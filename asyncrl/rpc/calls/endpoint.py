"""The endpoint that all connections of one actor share: its identity, its codec, its transport and its counters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.actors import ActorRecord
from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.rpc.wire.codec import Codec
from asyncrl.rpc.wire.envelope import PROTOCOL_VERSION, Header, Hello, Kind, encode_header
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.transport import Transport

CREDIT = 4096
"""Largest number of calls without an answer on one connection."""
NOT_READY = "not_ready"
"""Code of the answer to a call that came before the actor was set up. The caller's Peer repeats the call by itself."""


class EndpointOwner:
    """Owner of an endpoint. An actor overrides all of this; any other owner only calls a peer at a fixed address."""

    ready: bool = True
    """Whether the owner is set up. Before that none of its handlers is called."""

    async def resolve_peer(self, name: str, above: int) -> ActorRecord | None:
        """Asks the registry for an incarnation of ``name`` above ``above``; None if it knows of none in time."""
        raise AssertionError(f"the address of {name} is fixed")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose failure fails the actor."""
        raise AssertionError("a connection to a fixed address needs no task")

    def note_death(self, name: str, incarnation: int) -> None:
        """Note that this incarnation of an actor is dead, for example because a newer one has said HELLO."""

    def handler_failed(self, type: str, error: BaseException) -> None:
        """Note that the handler of a message of this type has failed."""


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """One actor as its peers see it: identity, keys, transport and limits."""

    name: str
    incarnation: int
    credentials: Credentials
    transport: Transport
    call_timeout_s: float
    max_message_bytes: int
    owner: EndpointOwner = field(default_factory=EndpointOwner)
    codec: Codec = field(default_factory=Codec)
    param_version: int = -1
    """Newest policy version that the actor knows of; -1 before any."""
    ending: bool = False
    """Whether the actor's tasks are over or being cancelled: no call is served and no peer is looked up."""
    counters: Counters = field(default_factory=Counters)
    histograms: Histograms = field(default_factory=Histograms)

    def header(
        self,
        kind: Kind,
        type: str,
        *,
        id: int = 0,
        in_reply_to: int = 0,
        deadline_ms: int = 0,
        answered_below: int = 0,
    ) -> bytes:
        """The first frame of a message from this actor."""
        return encode_header(
            Header(
                PROTOCOL_VERSION,
                kind,
                id,
                in_reply_to,
                self.name,
                self.incarnation,
                self.param_version,
                deadline_ms,
                type,
                answered_below,
            )
        )

    def hello(self, id: int) -> list[Any]:
        """The message that opens a connection."""
        body = Hello(
            run_id=self.credentials.run_id,
            name=self.name,
            incarnation=self.incarnation,
            max_message_bytes=self.max_message_bytes,
            secret=self.credentials.secret,
        )
        return [self.header(Kind.HELLO, "Hello", id=id), *self.codec.encode(body)]


def size_of(frames: list[Any]) -> int:
    """Bytes of a message's body and buffers."""
    if len(frames) == 1:
        return len(frames[0])
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames)

"""Base classes of all messages between actors; the modules of this package have the messages and their values.

A message is a frozen msgspec struct. Its class name is the ``type`` in the envelope's header; its body is the struct as
a MessagePack map, validated against these annotations when decoded. Arrays (numpy) travel as buffers behind the body.
Fields are only ever added, with a default. Messages are never part of a reference cycle, so the garbage collector need
not follow the thousands of groups that are held (``gc=False``).

A request names the class of its reply (``reply``), and whether it may be repeated (``idempotent``): twice then has the
same effect as once. A message that is sent without a reply is a cast. A call is parked if its receiver answers only
once there is news, or its caller's parking time is over.

Requests and casts name the roles that may send them (``senders``). A role is the part of an actor's name before the
slash: a role of the run's actors, ``agent``, ``launcher`` or ``viewer``. A reply has no senders, since it is only sent
as the answer to a request. An actor refuses to serve a message without senders (LookupError), so that no message lacks
them by mistake.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from asyncrl.core.roles import ROLES, role_of

Uid = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0)]
FinishReason = Literal["stop", "length", "turns", "time"]
"""Cause of a trajectory's end. ``stop``: the policy or the user's code. The others are limits: of tokens in a response
or the context, of turns, and of time."""

ANYBODY = frozenset({"*"})
"""Senders of messages outside of runs."""
ACTORS = frozenset(ROLES)
MEMBERS = ACTORS | {"agent"}
"""Roles of all processes that register with the controller."""
AGENT, LAUNCHER, VIEWER = frozenset({"agent"}), frozenset({"launcher"}), frozenset({"viewer"})
LEARNER, ROLLOUTER, DATALOADER = frozenset({"learner"}), frozenset({"rollouter"}), frozenset({"dataloader"})
EPISODES, SINKS = frozenset({"episodes"}), frozenset({"sinks"})


class Message(Struct, gc=False, frozen=True, kw_only=True):
    """Base of everything that may be the body of an envelope (rpc)."""

    senders: ClassVar[frozenset[str]] = frozenset()
    """Roles that may send it; none for a reply."""


class Request(Message, frozen=True, kw_only=True):
    """Base of every message that gets a reply."""

    reply: ClassVar[type[Message]]
    idempotent: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    """Whether a long wait for the reply is normal idleness: the call is parked until there is news."""


class Done(Message, frozen=True):
    """Reply without content: the request was carried out."""


def senders_of(message: type[Message]) -> frozenset[str]:
    """Return the roles that may send a message of this class. Raises LookupError if it names none."""
    if not message.senders:
        raise LookupError(f"{message.__module__} does not say who may send {message.__name__}")
    return message.senders


def may_send(name: str, senders: frozenset[str]) -> bool:
    """Whether the role of an actor is among the senders of a message."""
    return role_of(name) in senders or senders is ANYBODY

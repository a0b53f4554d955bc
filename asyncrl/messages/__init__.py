"""Base classes of all messages between actors; the modules of this package have the messages and their values.

A message is a frozen msgspec struct. Its class name is the ``type`` in the envelope's header; its body is the
struct as a MessagePack map, validated against these annotations when decoded. Arrays (numpy) travel as buffers
behind the body. Fields are only ever added, with a default. No message is part of a reference cycle. So messages opt
out of garbage collection (``gc=False``), and the collector does not scan the thousands of groups that are held.

A ``Request`` is answered. It names the type of its answer (``reply``) and whether handling it twice has the effect of
handling it once (``idempotent``). A *cast* is any other message that an actor sends on its own: it has no answer.
Requests and casts name the roles that may send them (``senders``). A role is the part of an actor's name before the
slash: one of the run's roles, ``agent``, ``launcher`` or ``viewer``. A reply has no senders. An actor fails at its
start with LookupError if it has a handler for a message without senders, so none is forgotten by mistake.
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
    """Whether waiting for the answer is normal idleness. The request is then parked: answered once there is news, or
    empty when the caller's waiting time is over."""


class Done(Message, frozen=True):
    """Reply without content: the request was carried out."""


def senders_of(message: type[Message]) -> frozenset[str]:
    """Return the roles that may send a message of this class. Raises LookupError if it names none."""
    if not message.senders:
        raise LookupError(f"{message.__module__} does not say who may send {message.__name__}")
    return message.senders


def may_send(name: str, senders: frozenset[str]) -> bool:
    """Whether the role of an actor is among the senders of a message, or every role may send it (ANYBODY)."""
    return role_of(name) in senders or senders is ANYBODY

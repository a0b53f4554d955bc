"""Every message between actors, and the values they carry.

A message is a frozen msgspec struct. Its class name is the ``type`` in the envelope's header; its body is the
struct as a MessagePack map, validated against these annotations when decoded. Arrays (numpy) travel as buffers
behind the body. Fields are only ever added, with a default. None of it is ever part of a cycle, so the garbage
collector need not follow the thousands of groups that are held (``gc=False``).

A request names its reply (``reply``) and whether it may simply be repeated (``idempotent``): doing it twice then
has the effect of doing it once. A request without a reply is a cast. Each that is sent unasked names the roles that may
send it (``senders``). A role is the part of a name before the slash: those of the run's actors, ``agent``, ``launcher``
and ``viewer``. A message without senders, such as a reply, may not be sent unasked. An actor refuses to serve one
(LookupError), so that no message lacks its senders by mistake.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from asyncrl.core.roles import ROLES, role_of

Uid = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0)]
FinishReason = Literal["stop", "length", "turns", "time"]
"""Cause of an end: the policy or the user's code; the longest response or context, the most turns, the longest time."""

ANYBODY = frozenset({"*"})
"""Senders of messages outside of runs."""
ACTORS = frozenset(ROLES)
MEMBERS = ACTORS | {"agent"}
"""All processes that register."""
AGENT, LAUNCHER, VIEWER = frozenset({"agent"}), frozenset({"launcher"}), frozenset({"viewer"})
LEARNER, ROLLOUTER, DATALOADER = frozenset({"learner"}), frozenset({"rollouter"}), frozenset({"dataloader"})
EPISODES, SINKS = frozenset({"episodes"}), frozenset({"sinks"})


class Message(Struct, gc=False, frozen=True, kw_only=True):
    """Base of everything that may be an envelope's body."""

    senders: ClassVar[frozenset[str]] = frozenset()
    """Roles that may send it unasked; none for a reply."""


class Request(Message, frozen=True, kw_only=True):
    """Base of every message that is answered."""

    reply: ClassVar[type[Message]]
    idempotent: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    """Whether to wait for the answer is normal idleness; it is then parked until there is news."""


class Done(Message, frozen=True):
    """The reply that says no more than that it was done."""


def senders_of(message: type[Message]) -> frozenset[str]:
    """The roles that may send it. Raises LookupError."""
    if not message.senders:
        raise LookupError(f"{message.__module__} does not say who may send {message.__name__}")
    return message.senders


def may_send(name: str, senders: frozenset[str]) -> bool:
    """Whether the role of an actor is among the senders of a message."""
    return role_of(name) in senders or senders is ANYBODY

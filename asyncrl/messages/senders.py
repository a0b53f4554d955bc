"""Senders of messages: the roles whose actors may send one, named by its class as ``senders``. Pure.

A role is the part of a name before the slash: those of the run's actors, ``agent``, ``launcher`` and ``viewer``.
Invariant: a message without senders, such as a reply, may not be sent unasked. An actor refuses to serve one
(LookupError), so that no message lacks its senders by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.messages import Message
from asyncrl.roles import ROLES, role_of

ANYBODY = frozenset({"*"})
"""Senders of messages outside of runs."""
ACTORS = frozenset(ROLES)
MEMBERS = ACTORS | {"agent"}
"""All processes that register."""
AGENT, LAUNCHER, VIEWER = frozenset({"agent"}), frozenset({"launcher"}), frozenset({"viewer"})
LEARNER, ROLLOUTER, DATALOADER = frozenset({"learner"}), frozenset({"rollouter"}), frozenset({"dataloader"})
EPISODES, SINKS = frozenset({"episodes"}), frozenset({"sinks"})


def senders_of(message: type[Message]) -> frozenset[str]:
    """The roles that may send it. Raises LookupError."""
    if not message.senders:
        raise LookupError(f"{message.__module__} does not say who may send {message.__name__}")
    return message.senders


def may_send(name: str, senders: frozenset[str]) -> bool:
    """Whether the role of an actor is among the senders of a message."""
    return role_of(name) in senders or senders is ANYBODY


def listed(senders: Iterable[str]) -> str:
    """The roles in words."""
    return ", ".join(sorted(senders))

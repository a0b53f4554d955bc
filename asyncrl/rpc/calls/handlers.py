"""Typed handlers: which method of an actor serves which message, and the caller that it is given.

A method serves the message type that annotates its parameter ``request``, or each type of a union.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages import Message, Request, senders_of


class Connection:
    """Identity of a caller's connection. Handlers compare it, and use it as a weak key for state of the connection."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Caller:
    """The caller of a handler, and how long it waits for the answer."""

    name: str
    incarnation: int
    param_version: int
    deadline: float
    """Time at which the caller gives up, on the loop's clock."""
    connection: Connection = field(default_factory=Connection)
    """Connection of the caller: several callers may share a name."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @property
    def park_s(self) -> float:
        """Longest time to park a call (s). It ends before half of the caller's time is over, so a call that reaches its
        deadline means a dead peer."""
        return 0.45 * self.remaining_s


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound method and properties of the message that it serves."""

    function: Callable[[Any, Caller], Any]
    request: type[Message]
    is_async: bool
    idempotent: bool
    """Whether the call may be handled twice, so that its reply need not be stored; True for a cast."""
    answered: bool
    """Whether the message is a Request, which gets a reply, and not a cast."""
    senders: frozenset[str]
    """Roles that may send it."""


def handler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method ``(self, request: SomeMessage, caller: Caller)`` as the handler of SomeMessage, or of a union.

    A plain method runs in the receive callback and must not block; it returns the reply, or a future of it. An async
    one runs as a task. The future or the task is cancelled when the caller cancels or its deadline is over.
    """
    function.__asyncrl_handler__ = True  # type: ignore[attr-defined]
    return function


def handlers_of(owner: object) -> dict[str, Handler]:
    """Return the handlers of an object, by the name of their message type.

    Raises LookupError if a message type does not say which roles may send it.
    """
    handlers: dict[str, Handler] = {}
    for name in dir(type(owner)):
        function = getattr(type(owner), name, None)
        if not getattr(function, "__asyncrl_handler__", False):
            continue
        bound: Callable[[Any, Caller], Any | Awaitable[Any]] = getattr(owner, name)
        hint = typing.get_type_hints(function)["request"]
        for request in typing.get_args(hint) or (hint,):
            answered = issubclass(request, Request)
            handlers[request.__name__] = Handler(
                bound,
                request,
                inspect.iscoroutinefunction(function),
                idempotent=not answered or request.idempotent,
                answered=answered,
                senders=senders_of(request),
            )
    return handlers

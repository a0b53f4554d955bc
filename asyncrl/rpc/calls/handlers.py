"""Typed handlers: which method of an actor serves which message, and who calls it.

The annotation of ``request`` is what a method serves; how it is run follows from the method and the message.
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
    """One connection of a caller, for as long as it is served: to be known again by, and to keep things for, weakly."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Caller:
    """The caller of a handler, and the time that it will wait."""

    name: str
    incarnation: int
    param_version: int
    deadline: float
    """Time at which the caller gives up, on the loop's clock."""
    connection: Connection = field(default_factory=Connection)
    """Connection of the caller: names may be shared by several."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @property
    def park_s(self) -> float:
        """Seconds to park a call at most: it is answered before half of its deadline, so expiry means a dead peer."""
        return 0.45 * self.remaining_s


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound method and what it serves."""

    function: Callable[[Any, Caller], Any]
    request: type[Message]
    is_async: bool
    idempotent: bool
    answered: bool
    senders: frozenset[str]
    """Roles that may send it."""


def handler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method ``(self, request: SomeMessage, caller: Caller)`` as the handler of SomeMessage.

    A plain method runs in the receive callback and must not block; it returns the reply, or a future of it. An async
    one runs as a task. The future or the task is cancelled when the caller cancels or its deadline is over.
    """
    function.__asyncrl_handler__ = True  # type: ignore[attr-defined]
    return function


def handlers_of(owner: object) -> dict[str, Handler]:
    """The handlers of an object, by the name of what they serve. Raises LookupError for a message without senders."""
    found: dict[str, Handler] = {}
    for name in dir(type(owner)):
        function = getattr(type(owner), name, None)
        if not getattr(function, "__asyncrl_handler__", False):
            continue
        request = typing.get_type_hints(function)["request"]
        bound: Callable[[Any, Caller], Any | Awaitable[Any]] = getattr(owner, name)
        answered = issubclass(request, Request)
        found[request.__name__] = Handler(
            bound,
            request,
            inspect.iscoroutinefunction(function),
            not answered or request.idempotent,
            answered,
            senders_of(request),
        )
    return found

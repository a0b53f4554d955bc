"""Watch over an engine's life, so that no wait on it outlives it.

vLLM leaves control calls waiting for ever when its engine core dies. Here every such wait stands under a guard,
and ``declare_dead`` ends all guards at once; so does a guard's own deadline, because an engine that does not
answer in time is as good as dead. No task is needed for it.

Fails with EngineDied, always with the first reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.core.errors import EngineDied


class Watch:
    """Life and death of one engine. ``on_death`` is called once, with the reason."""

    def __init__(self, name: str, on_death: Callable[[str], None]) -> None:
        self._name = name
        self._on_death = on_death
        self._reason: str | None = None
        self._guards: set[asyncio.Timeout] = set()

    @property
    def dead(self) -> bool:
        """Whether it was declared dead."""
        return self._reason is not None

    def died(self) -> EngineDied:
        """The error that says why."""
        assert self._reason is not None, "the engine lives"
        return EngineDied(self._name, self._reason)

    def require_alive(self) -> None:
        """Raise EngineDied if it was declared dead."""
        if self._reason is not None:
            raise self.died()

    def declare_dead(self, reason: str) -> None:
        """End every guarded wait with EngineDied. Only the first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        for guard in self._guards:
            if not guard.expired():
                guard.reschedule(asyncio.get_running_loop().time())
        self._on_death(reason)

    @asynccontextmanager
    async def guard(self, what: str, deadline_s: float | None) -> AsyncIterator[None]:
        """Wait inside for ``what`` no longer than ``deadline_s`` or the engine's life.

        None leaves the end to ``declare_dead``.
        """
        self.require_alive()
        try:
            async with asyncio.timeout(deadline_s) as guard:
                self._guards.add(guard)
                try:
                    yield
                finally:
                    self._guards.discard(guard)
        except TimeoutError as error:
            if not guard.expired():
                raise
            # Where it was this guard that ended because of another reason, that one stays.
            self.declare_dead(f"did not answer {what} within {deadline_s} s")
            raise self.died() from error

"""Hands the deltas of one request to its reader; those not fetched yet are merged, so it never grows long.

Invariant: no token is lost and their order is kept. Fails with the EngineDied that it was given, once what came before
is read.
"""

from __future__ import annotations

import asyncio

from asyncrl.errors import EngineDied
from asyncrl.rollouter.engines.base import TokenDelta


class DeltaStream:
    """One writer and one reader, both on one event loop."""

    def __init__(self) -> None:
        self._pending: TokenDelta | None = None
        self._error: EngineDied | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add a delta. Nothing follows one with a finish reason."""
        held = self._pending
        if held is not None:
            delta = TokenDelta(
                tokens=held.tokens + delta.tokens,
                logprobs=held.logprobs + delta.logprobs,
                finish_reason=delta.finish_reason,
                spans=delta.spans,
                cached_tokens=max(held.cached_tokens, delta.cached_tokens),
            )
        self._pending = delta
        self._wake()

    def fail(self, error: EngineDied) -> None:
        """End the stream with an error: nothing more will come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenDelta:
        """The tokens since the last call; waits for them as long as the engine lives. Raises EngineDied."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delta, self._pending = self._pending, None
        return delta

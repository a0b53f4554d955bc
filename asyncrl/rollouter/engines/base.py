"""The interface of every inference engine.

An engine samples tokens and has its weights replaced while it lives. It knows nothing of prompt groups, rewards
or other actors; the rollouter owns its pause and keeps the tokens it has handed over.

Order of an update: ``pause`` → ``load`` → ``resume``; weights are either staged already, and were shown to
``accept`` while the engine generated, or are received by broadcast within ``load``. Between the start and the end of a
load the engine is never stepped; after a load that failed it stays paused until one succeeds. A method that talks to
the engine raises EngineDied when the engine is gone or does not answer in time; after EngineDied only ``close`` may be
called.

Strings that end a response are the caller's business: it sees the whole joined text, an engine only the tokens of
one submission. It calls ``abort`` when it has found one. Tokens that do are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrl.core.errors import EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.weights import BroadcastPart
from asyncrl.weights.held_version import HeldVersion

PauseMode = Literal["abort", "keep", "wait"]
FIRST = -1
"""Priority before all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One submission of a sequence to an engine."""

    id: str
    """Name of this submission; unique among those in flight."""
    prompt_ids: Sequence[int]
    """Prompt and, for a resumed trajectory, the tokens held already."""
    max_tokens: int
    temperature: float
    """Temperature; 0 is greedy, only for evaluation."""
    seed: int | None
    """Seed of the response's noise, one for all submissions; None leaves it to the engine. A resume replays none."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the response, like the model's end-of-sequence token."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of the same salt."""
    priority: int = 0
    """Priority; lower runs first."""
    key: str = ""
    """Name of the response over all its submissions; empty: it has only this one. For engines that simulate."""
    held: int = 0
    """Number of prompt_ids that were sampled by earlier submissions of the same response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens sampled since the last delta, each with the log-prob (nats, after temperature) that sampled it.

    The last delta of a submission has a finish reason: ``stop`` (the last token is the end-of-sequence token or one of
    the request's ``stop_token_ids``), ``length``, or ``abort``; and the version spans over this submission's tokens,
    from 0 and without gaps. It may hold no tokens, and an abort before the first token leaves no spans.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    """Tokens of the submission's prompt that the prefix cache held when it began; in every delta that has tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of the calls in an engine."""

    kv_use: float
    """Share of the KV cache in use, 0 to 1."""
    queued: int
    """Requests that it has not begun."""
    preemptions: int
    """Requests that it has put back for want of room, since its start."""


class Engine(Protocol):
    """An inference engine."""

    name: str
    workers: int
    """Processes that take part in a broadcast."""

    @property
    def kv_use(self) -> float | None:
        """Share of the KV cache in use, 0 to 1; None where that is not known. From any thread."""

    @property
    def load_now(self) -> EngineLoad | None:
        """The load; None where it cannot say, as while it comes up. Needed for rollout.concurrency = "auto"."""

    async def start(self) -> None:
        """Bring it up. It serves no version yet and generates nothing before its first load.

        Raises ConfigError when it cannot run as the configuration asks.
        """

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Stream the response. Ends after the delta with a finish reason.

        Raises ValueError for a request that the engine can never serve, as one longer than its context.
        """

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests early; each stream gets a last delta with ``abort``.

        Tokens that were sampled and not handed over may be dropped. ``pause`` drops none.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. ``abort`` ends all requests, ``keep`` freezes them, ``wait`` finishes them first."""

    async def accept(self, staged: HeldVersion) -> None:
        """Raise WeightsCorrupt unless these are all of the model's weights, in the right shapes. At any time."""

    async def load(self, weights: HeldVersion | BroadcastPart, *, recompute_kv: bool) -> None:
        """Replace the weights. Paused engines only; the caller keeps staged weights open meanwhile.

        Complete or failed (WeightsCorrupt; BroadcastFailed when the other members of the broadcast are to blame); after
        a failure it is repeated whole. ``recompute_kv`` drops every cache block, so that kept requests recompute theirs
        under the new weights; without it the tokens that kept requests sample from here on are marked ``mixed_kv`` in
        their spans.
        """

    async def resume(self) -> None:
        """Continue stepping."""

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-prob (nats, temperature 1) of each token of ``ids`` given those before it; the first is absent.

        It goes before requests that wait.
        """

    async def checksum(self) -> str:
        """Checksum of the weights as the engine holds them; equal in engines of one kind that serve one version."""

    async def close(self) -> None:
        """End it and everything it started. Never raises because it is gone already."""


class DeltaStream:
    """Hands the deltas of one request to its reader, and merges those not fetched yet, so it never grows long.

    One writer and one reader, both on one event loop. Invariant: no token is lost and their order is kept. Fails with
    the EngineDied that it was given, once earlier deltas are read.
    """

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

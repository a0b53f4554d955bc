"""The interface of every inference engine.

An engine samples tokens, and the rollouter replaces its weights while it runs. It knows nothing of prompt groups,
rewards or other actors. The rollouter decides when the engine pauses, and keeps the tokens that it has received.

A weight update calls ``pause``, ``load`` and ``resume``, in this order. *Staged* weights are in this host's memory
before the pause, and ``accept`` checks them while the engine generates. Other weights arrive by broadcast during
``load``. The engine never steps during a load. After a failed load it stays paused until a load succeeds. A method that
talks to the engine raises EngineDied if the engine is gone or does not answer in time. After EngineDied only ``close``
may be called.

One or more *submissions*, requests to an engine, sample a response; each continues after the tokens of the earlier
ones. The engine ends a response at stop tokens. The caller looks for stop strings, because an engine sees the tokens of
one submission only, and calls ``abort`` when it finds one.

LocalEngine is the base of the engines that have no process of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from asyncrl.core.errors import BroadcastFailed, EngineDied
from asyncrl.core.truncation import Truncation
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import TokenSets
from asyncrl.messages.weights import BroadcastPart
from asyncrl.weights.held_version import HeldVersion, Layout, check_complete

if TYPE_CHECKING:
    from asyncrl.weights.broadcast import Receiver

PauseMode = Literal["abort", "keep", "wait"]
FIRST = -1
"""The highest priority: such a request runs before all others."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One submission of a sequence to an engine."""

    id: str
    """Name of this submission; unique among the requests in flight."""
    prompt_ids: Sequence[int]
    """The prompt, followed by the tokens that earlier submissions of the response sampled."""
    max_tokens: int
    """Most tokens that this submission may sample."""
    temperature: float
    """Temperature; 0 is greedy, only for evaluation."""
    truncation: Truncation | None = None
    """Truncation of the distribution; None samples from the whole one."""
    seed: int | None
    """Seed of the sampling noise, the same for all submissions of a response; None: the engine chooses one. A later
    submission does not reuse the noise of earlier ones."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the response, like the model's end-of-sequence token."""
    cache_salt: str = ""
    """Name of a share of the prefix cache: only requests with the same salt share cached blocks."""
    priority: int = 0
    """Priority; lower runs first."""
    key: str = ""
    """Name of the response, the same in all its submissions; empty if this is the only one. Only the simulated engine
    reads it."""
    held: int = 0
    """Number of prompt_ids that were sampled by earlier submissions of the same response."""
    routed: int = 0
    """Number of the first prompt_ids whose routes are known; an engine returns those of the tokens after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """The tokens of a submission that were sampled since its previous delta.

    The last delta of a submission has a finish reason and the version spans. It may have no tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    """Log-prob of each token when it was sampled (nats, after temperature and truncation)."""
    sets: TokenSets | None = None
    """The set from which each token was sampled, if the request has a truncation and the delta has tokens."""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """``stop``: the last token is the end-of-sequence token or one of the request's ``stop_token_ids``. None: further
    deltas follow."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Versions that sampled the submission's tokens: from its first token on, without gaps. Empty if it has none."""
    cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache held when the submission began; in every delta that has tokens."""
    routes: np.ndarray | None = None
    """Routes (messages/routes.py) of further tokens: those of a submission begin behind ``GenerationRequest.routed``
    and, with its last delta, cover all its tokens but the last. They may be later than the tokens. None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    kv_use: float
    """Share of the KV cache in use, 0 to 1."""
    queued: int
    """Number of requests that the engine has not begun."""
    preemptions: int
    """Number of times since its start that the engine preempted a request because the KV cache was full."""


class Engine(Protocol):
    """An inference engine."""

    name: str
    workers: int
    """Number of the engine's processes that take part in a broadcast."""
    returns_routes: bool
    """Whether deltas have routes."""
    loaded_by_ipc: bool
    """Whether the last load took all weights from a copy on the GPU (weights/tensors.py)."""

    @property
    def kv_use(self) -> float | None:
        """Share of the KV cache in use, 0 to 1; None if it is not known. Callable from any thread."""

    @property
    def load_now(self) -> EngineLoad | None:
        """The newest load; None if it is not known, as during the start. rollout.concurrency = "auto" needs it."""

    async def start(self) -> None:
        """Start the engine and wait until it is ready for its first load. Before that load it generates nothing.

        Raises ConfigError if it cannot run as configured.
        """

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Submit a request and yield its deltas; ends after the delta with a finish reason.

        Raises ValueError for a request that the engine can never serve, such as one longer than its context.
        """

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests early; each stream gets a last delta with finish reason ``abort``.

        Sampled tokens that are in no delta yet may be lost. ``pause("abort")`` loses none.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. ``abort`` ends all requests, ``keep`` freezes them, ``wait`` first lets them finish."""

    async def accept(self, staged: HeldVersion) -> None:
        """Check that staged weights are all of the model's, in the right shapes. Callable at any time.

        Raises WeightsCorrupt.
        """

    async def load(self, weights: HeldVersion | BroadcastPart, *, recompute_kv: bool) -> None:
        """Replace all weights of the paused engine. The caller keeps staged weights open until it returns.

        With ``recompute_kv`` the engine drops its KV cache, and requests kept over the pause compute their keys and
        values again under the new weights. Without ``recompute_kv`` the kept requests continue with old keys and
        values, and the spans of their further tokens are marked ``mixed_kv``. Raises WeightsCorrupt, or BroadcastFailed
        if the broadcast broke; the caller then repeats the whole load.
        """

    async def resume(self) -> None:
        """Continue stepping."""

    async def sleep(self) -> None:
        """Free the GPU memory of the paused engine: its weights, keys and values. Call ``wake`` or ``close`` next."""

    async def wake(self) -> None:
        """Take the memory again. The engine is paused, and has no weights before the next load."""

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-prob (nats, temperature 1) of each token of ``ids`` but the first, given the tokens before.

        A score runs before requests that wait.
        """

    async def checksum(self) -> str:
        """Return a checksum of the loaded weights. Engines of the same kind with the same version have the same one."""

    async def close(self) -> None:
        """End the engine and everything that it started; does nothing if it is gone already."""


class LocalEngine:
    """Base of an engine that runs in the rollouter's process: its death, and its receiver of broadcasts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers = 1
        self.loaded_by_ipc = False
        self._dead: EngineDied | None = None
        """The error of every later call, once the engine is dead."""
        self._receiver: Receiver | None = None
        self._layout: Layout | None = None
        """Layout of the last version loaded from staged weights; later versions must have the same."""

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    async def wake(self) -> None:
        self._require_alive()

    async def accept(self, staged: HeldVersion) -> None:
        self._require_alive()
        if self._layout is not None:
            check_complete(staged.version, staged.layout, self._layout)

    async def close(self) -> None:
        """Close the receiver, which ends a broadcast."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)
            self._receiver = None

    async def _receive(self, weights: BroadcastPart, take: Callable[[Iterator[Any]], T]) -> T:
        """Receive a broadcast on a thread; returns what ``take`` makes there of the verified buckets, uint8 tensors."""

        def receive() -> T:
            # The import brings torch, which nothing else of the simulated engine needs.
            from asyncrl.weights.broadcast import Receiver

            receiver = self._receiver = self._receiver or Receiver()
            if self._dead is not None:
                # ``close`` ran before this receiver existed, so it did not close it.
                receiver.close()
            return take(receiver.receive(weights, worker=0))

        try:
            return await asyncio.to_thread(receive)
        except BroadcastFailed:
            # If the engine was closed, that ended the broadcast: raise EngineDied.
            self._require_alive()
            raise

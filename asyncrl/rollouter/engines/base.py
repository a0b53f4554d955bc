"""The interface of every inference engine.

An engine samples tokens and has its weights replaced while it lives. It knows nothing of prompt groups, rewards
or other actors; the rollouter owns its pause and keeps the tokens it has handed over.

Order of an update: ``stage`` (while it generates) → ``pause`` → ``load`` → ``resume``. Between the start and the
end of a load the engine is never stepped. A method that talks to the engine raises EngineDied when the engine is
gone or does not answer in time; after EngineDied only ``close`` may be called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrl.messages import Manifest, VersionSpan

PauseMode = Literal["abort", "keep", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One submission of a sequence to an engine."""

    id: str
    prompt_ids: Sequence[int]
    """Prompt and, for a resumed trajectory, the tokens held already."""
    max_tokens: int
    temperature: float
    """0 is greedy; only for evaluation."""
    seed: int | None
    stop: Sequence[str] = ()
    """Strings that end the response. The engine compares them with the text of this submission only."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of the same salt."""
    priority: int = 0
    """Lower runs first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens sampled since the last delta, each with the log-prob (nats, after temperature) that sampled it.

    The last delta of a submission has a finish reason: ``stop`` (end-of-sequence or stop string, its token
    included), ``length``, or ``abort``; and the version spans over this submission's tokens, from 0.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    spans: list[VersionSpan] = field(default_factory=list)


class Engine(Protocol):
    """An inference engine."""

    name: str

    async def start(self) -> None:
        """Bring it up. It serves no version yet and generates nothing before its first load."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream the response. Ends after the delta with a finish reason."""

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests; each stream still gets its sampled tokens and a last delta with ``abort``."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. ``abort`` ends all requests, ``keep`` freezes them, ``wait`` finishes them first."""

    async def stage(self, manifest: Manifest) -> None:
        """Fetch and verify a version's weights while generation goes on. Raises WeightsCorrupt before any load."""

    async def load(self, manifest: Manifest, *, recompute_kv: bool) -> None:
        """Replace the weights. Paused engines only; complete or failed, and after a failure repeated whole.

        ``recompute_kv`` drops every cache block, so that kept requests recompute theirs under the new weights.
        """

    async def resume(self) -> None:
        """Go on stepping."""

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-prob (nats, temperature 1) of each token of ``ids`` given those before it; the first is absent."""

    async def check(self) -> None:
        """Raise EngineDied if it is gone."""

    async def close(self) -> None:
        """End it and everything it started. Never raises because it is gone already."""

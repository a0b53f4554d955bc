"""Episodes: the coroutine that turns one prompt into a trajectory by calling the engine.

``EpisodeEngine.generate`` hides that weights change, engines are paused and die: it returns a finished piece of
text whose every token carries the log-prob and the version that sampled it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import EngineDied
from asyncrl.messages import FinishReason, Ticket, Trajectory, VersionSpan
from asyncrl.rollouter.engine_host import EngineHost
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.response import Response
from asyncrl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one call of ``generate`` sampled. All lists have one entry for each token."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    text: str
    resumes: int


class EpisodeEngine:
    """The engine as one episode sees it."""

    def __init__(self, host: EngineHost, tokenizer: Tokenizer, config: Config, ticket: Ticket, sample: int) -> None:
        self._host = host
        self._tokenizer = tokenizer
        self._config = config
        self._ticket = ticket
        self._sample = sample
        self._calls = 0

    async def generate(self, ids: Sequence[int], max_tokens: int | None = None) -> Generated:
        """Sample a continuation of ``ids``, at most ``max_tokens`` long.

        The death of an engine costs nothing that it had handed over; how often an engine may die is its host's matter.
        """
        ticket, rollout = self._ticket, self._config.rollout
        response = Response(max_tokens=max_tokens or ticket.max_tokens, stop=rollout.stop)
        self._calls += 1
        key = f"{ticket.uid}/{self._sample}/{self._calls}"
        while response.finish_reason is None:
            version = await self._host.serving()
            loads = self._host.loads
            response.submitted(version)
            request = GenerationRequest(
                id=f"{key}/{response.submissions}",
                prompt_ids=[*ids, *response.tokens],
                max_tokens=response.remaining,
                temperature=ticket.temperature,
                seed=request_seed(self._config.run.seed, key, len(response.tokens)),
                cache_salt=f"v{version}",
                key=key,
                held=len(response.tokens),
            )
            try:
                await self._submit(request, response)
            except EngineDied:
                if self._host.loads == loads:
                    # What was handed over was all sampled before the death, under the version of the submission.
                    response.end_submission("abort")
                else:
                    response.lose_submission()
        return Generated(
            tokens=response.tokens,
            logprobs=response.logprobs,
            spans=response.spans,
            finish_reason=response.finish_reason,
            text=self._tokenizer.decode(response.tokens),
            resumes=response.submissions - 1,
        )

    async def _submit(self, request: GenerationRequest, response: Response) -> None:
        stopped = False
        async for delta in self._host.stream(request):
            if not stopped and delta.tokens:
                stopped = response.extend(delta.tokens, delta.logprobs, self._tokenizer.decode)
                if stopped and delta.finish_reason is None:
                    await self._host.abort(request.id)
            if delta.finish_reason is not None:
                response.end_submission(delta.finish_reason, delta.spans)


async def single_turn(engine: EpisodeEngine, ticket: Ticket, sample: int) -> Trajectory:
    """One prompt, one response."""
    generated = await engine.generate(ticket.prompt_ids.tolist())
    return Trajectory(
        sample=sample,
        tokens=np.array(generated.tokens, np.int32),
        logprobs=np.array(generated.logprobs, np.float32),
        loss_mask=np.ones(len(generated.tokens), np.uint8),
        spans=generated.spans,
        finish_reason=generated.finish_reason,
        text=generated.text,
        resumes=generated.resumes,
    )


def request_seed(run_seed: int, key: str, held: int) -> int:
    """Seed of a submission: siblings differ, and a resume replays no noise. 63 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{key}/{held}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

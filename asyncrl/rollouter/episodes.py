"""Episodes: the coroutine that turns one prompt into a trajectory by calling the engine.

``EpisodeEngine.generate`` hides that weights change, engines are paused and die: it returns a finished piece of
text whose every token carries the log-prob and the version that sampled it.

Fails with TrajectoryFailed when engines have died of the prompt too often (suspects.py). A death counts as no attempt
otherwise, and costs no token that was handed over: what comes next is sampled after those, by the next engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import EngineDied
from asyncrl.messages import FinishReason
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.groups import Ticket, Trajectory, VersionSpan
from asyncrl.rollouter.account import SampleAccount
from asyncrl.rollouter.engine_host import EngineHost
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.response import Response
from asyncrl.stops import Stops
from asyncrl.tokenizer import Tokenizer


class TrajectoryFailed(Exception):
    """A trajectory failed for good; the text is the reason."""


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

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Tokenizer,
        stops: Stops,
        config: Config,
        ticket: Ticket,
        account: SampleAccount,
    ) -> None:
        self._host = host
        self._tokenizer = tokenizer
        self._stops = stops
        self._config = config
        self._ticket = ticket
        self._account = account
        self._calls = 0

    async def generate(self, ids: Sequence[int], max_tokens: int | None = None) -> Generated:
        """Sample a continuation of ``ids``, at most ``max_tokens`` long. Raises TrajectoryFailed."""
        ticket = self._ticket
        response = Response(max_tokens=max_tokens or ticket.max_tokens, stops=self._stops)
        self._calls += 1
        key = f"{ticket.uid}/{self._account.sample}/{self._calls}"
        while response.finish_reason is None:
            self._require_innocent()
            async with self._host.turn(ticket) as version:
                # A sample of the same ticket may have had its turn before.
                self._require_innocent()
                response.submitted(version)
                self._account.submitted(version, len(response.tokens))
                request = GenerationRequest(
                    id=f"{key}/{response.submissions}",
                    prompt_ids=[*ids, *response.tokens],
                    max_tokens=response.remaining,
                    temperature=ticket.temperature,
                    seed=request_seed(self._config.run.seed, key, len(response.tokens)),
                    stop_token_ids=self._stops.token_ids,
                    cache_salt=f"v{version}",
                    key=key,
                    held=len(response.tokens),
                )
                died = not await self._submit(request, response)
                self._account.ended(len(response.tokens), response.spans, response.finish_reason, died=died)
        return Generated(
            tokens=response.tokens,
            logprobs=response.logprobs,
            spans=response.spans,
            finish_reason=response.finish_reason,
            text=self._tokenizer.decode(response.tokens),
            resumes=response.submissions - 1,
        )

    async def _submit(self, request: GenerationRequest, response: Response) -> bool:
        """One submission, until it ends; False when the engine died before that."""
        stopped = ended = False
        loads, known = self._host.loads, len(response.tokens)
        try:
            async with aclosing(self._host.stream(request, self._ticket)) as deltas:
                async for delta in deltas:
                    if not stopped and delta.tokens:
                        stopped = response.extend(delta.tokens, delta.logprobs, self._tokenizer.decode)
                        if self._host.loads == loads:
                            known = len(response.tokens)
                        if stopped and delta.finish_reason is None:
                            await self._host.abort(request.id)
                    if delta.finish_reason is not None:
                        response.end_submission(delta.finish_reason, delta.spans)
                        ended = True
        except EngineDied:
            if not ended:
                response.cut_submission(known)
        return ended

    def _require_innocent(self) -> None:
        failure = self._host.suspects.failure(self._ticket)
        if failure is not None:
            raise TrajectoryFailed(failure)


async def single_turn(engine: EpisodeEngine, ticket: Ticket, sample: int) -> Trajectory:
    """One prompt, one response."""
    generated = await engine.generate(ticket.prompt_ids.tolist())
    return Trajectory(
        sample=sample,
        sequences=[
            TokenSequence(
                tokens=np.array(generated.tokens, np.int32),
                logprobs=np.array(generated.logprobs, np.float32),
                spans=generated.spans,
            )
        ],
        finish_reason=generated.finish_reason,
        text=generated.text,
        resumes=generated.resumes,
    )


def request_seed(run_seed: int, key: str, held: int) -> int:
    """Seed of a submission: siblings differ, and a resume replays no noise. 63 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{key}/{held}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Calls of the policy: from token ids to a finished answer, and the response to a prompt as the simplest episode.

``PolicyCall.generate`` hides that weights change, engines are paused and die: it returns a finished piece of
text whose every token carries the log-prob and the version that sampled it.

Fails with TrajectoryFailed when engines have died of the prompt too often (suspects.py). A death counts as no attempt
otherwise, and costs no token that was handed over: the next tokens are sampled after those, by the next engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import EngineDied
from asyncrl.messages.groups import Lease, Trajectory
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.group_events import CallAccount
from asyncrl.rollouter.serving.response import Response
from asyncrl.rollouter.serving.stages import Phase
from asyncrl.stops import Stops
from asyncrl.tokenizer import Tokenizer


class TrajectoryFailed(Exception):
    """A trajectory failed for good; the text is the reason."""


class PolicyCall:
    """The engine as one call of the policy sees it."""

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Tokenizer,
        config: Config,
        lease: Lease,
        account: CallAccount,
        *,
        entered: Callable[[Phase], None] = lambda phase: None,
        sampled: Callable[[Response], None] = lambda response: None,
        submitted: Callable[[int], None] = lambda version: None,
    ) -> None:
        """``entered`` is told where the call is, ``sampled`` of each handover of tokens, ``submitted`` of the version
        that each submission begins with.
        """
        self._host = host
        self._tokenizer = tokenizer
        self._config = config
        self._lease = lease
        self._account = account
        self._entered = entered
        self._sampled = sampled
        self._submitted = submitted

    async def generate(self, ids: Sequence[int], response: Response, key: str) -> None:
        """Sample a continuation of ``ids`` into ``response``, until it is finished, from where it stands.

        ``key`` names the call in the whole run; the noise follows from it. Raises TrajectoryFailed. A call that is
        cancelled leaves in the response the tokens that it has sampled, and may be made again.
        """
        lease, stops = self._lease, response.stops
        while response.finish_reason is None:
            self._require_innocent()
            self._entered("queue" if self._host.serves else "paused")
            async with self._host.turn(lease) as version:
                # A sample of the same lease may have had its turn before.
                self._require_innocent()
                self._entered("engine")
                response.submitted(version)
                self._account.submitted(version, len(response.tokens))
                self._submitted(version)
                request = GenerationRequest(
                    id=f"{key}/{response.submissions}",
                    prompt_ids=[*ids, *response.tokens],
                    max_tokens=response.remaining,
                    temperature=lease.temperature,
                    seed=request_seed(self._config.run.seed, key) if self._config.rollout.request_seeds else None,
                    stop_token_ids=stops.token_ids,
                    # A load drops the cache, but under keep_kv = "stale": nothing that begins after it may find blocks
                    # of the weights before.
                    cache_salt=f"v{version}",
                    key=key,
                    held=len(response.tokens),
                )
                died = not await self._submit(request, response)
                self._account.ended(len(response.tokens), response.spans, response.finish_reason, died=died)

    async def _submit(self, request: GenerationRequest, response: Response) -> bool:
        """One submission, until it ends; False when the engine died before that."""
        stopped = ended = False
        loads, known = self._host.loads, len(response.tokens)
        prompt, lost = len(request.prompt_ids) - known, response.lost(self._host.version)
        try:
            async with aclosing(self._host.stream(request, self._lease, lost=lost)) as deltas:
                async for delta in deltas:
                    if not stopped and delta.tokens:
                        stopped = response.extend(delta.tokens, delta.logprobs, self._tokenizer.decode)
                        version = delta.spans[-1].version if delta.spans else self._host.version
                        response.computed, response.computed_at = prompt + len(response.tokens), version
                        # Handed over before any load: all of it is of the version that the submission began with.
                        if self._host.loads == loads:
                            known = len(response.tokens)
                        self._sampled(response)
                        # The stream is read on to its last delta, which tells the versions.
                        if stopped and delta.finish_reason is None:
                            await self._host.abort(request.id)
                    if delta.finish_reason is not None:
                        response.end_submission(delta.finish_reason, delta.spans)
                        ended = True
        except (EngineDied, asyncio.CancelledError) as error:
            if not ended:
                response.cut_submission(known)
            if not isinstance(error, EngineDied):
                raise
            response.computed = 0
        return ended

    def _require_innocent(self) -> None:
        failure = self._host.suspects.failure(self._lease)
        if failure is not None:
            raise TrajectoryFailed(failure)


async def single_turn(call: PolicyCall, lease: Lease, sample: int, stops: Stops, tokenizer: Tokenizer) -> Trajectory:
    """One prompt, one response. Raises TrajectoryFailed."""
    response = Response(max_tokens=lease.max_tokens, stops=stops)
    await call.generate(lease.prompt_ids.tolist(), response, f"{lease.uid}/{sample}/1")
    assert response.finish_reason is not None
    return Trajectory(
        sample=sample,
        sequences=[
            TokenSequence(
                tokens=np.array(response.tokens, np.int32),
                logprobs=np.array(response.logprobs, np.float32),
                spans=response.spans,
            )
        ],
        finish_reason=response.finish_reason,
        text=tokenizer.decode(response.tokens),
        resumes=response.submissions - 1,
    )


def request_seed(run_seed: int, key: str) -> int:
    """Seed of a response: siblings differ. 63 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

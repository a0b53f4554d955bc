"""Has an engine say what it makes of the learner's probe.

Scored tokens tell of the weights. Sampled ones, asked for as the run's are, also tell of what an engine makes of its
logits before it samples: the temperature, a cut of the distribution, a penalty. Requests are few and short, all at once
and before those that wait, so that an engine that batches does them in a few steps beside what runs.

Fails with EngineDied as the engine does; a token that is not sampled, since somebody pauses the engine, is left out.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np

from asyncrl.messages.weights import Probe
from asyncrl.rollouter.engines.base import FIRST, Engine, GenerationRequest
from asyncrl.rollouter.serving.drift import Drift, Sample, measure_drift


async def probe_engine(engine: Engine, probe: Probe, *, version: int, temperature: float) -> Drift:
    """The drift of an engine that has loaded ``version``; ``temperature`` is the run's."""
    sequences = [part.tolist() for part in np.split(probe.tokens, np.cumsum(probe.lengths)[:-1])]
    requests = [
        GenerationRequest(
            id=f"probe/{version}/{index}",
            prompt_ids=sequences[number][:place],
            max_tokens=1,
            temperature=temperature,
            seed=None,
            cache_salt=f"v{version}",
            priority=FIRST,
        )
        for index, (number, place) in enumerate(probe.places.tolist())
    ]
    work = [engine.score(tokens) for tokens in sequences], [_sample(engine, request) for request in requests]
    scores, samples = await asyncio.gather(*(asyncio.gather(*each, return_exceptions=True) for each in work))
    # None is left running; an engine that dies fails them all.
    for outcome in (*scores, *samples):
        if isinstance(outcome, BaseException):
            raise outcome
    return measure_drift(probe, scores, samples)  # type: ignore[arg-type]


async def _sample(engine: Engine, request: GenerationRequest) -> Sample | None:
    sampled: list[Sample] = []
    async with aclosing(engine.generate(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            sampled += zip(delta.tokens, delta.logprobs, strict=True)
    return sampled[0] if sampled else None

"""How an engine is asked for what it makes of a probe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from probes import TOKENS, make_probe, samples_of, scores_of
from virtual import run_virtual

from asyncrl.errors import EngineDied
from asyncrl.rollouter.engines.base import GenerationRequest, TokenDelta
from asyncrl.rollouter.serving.probing import probe_engine

PROBE = make_probe()


class Asked:
    """Answers as it should, but for what it is told; nothing before all is asked."""

    def __init__(self, *, aborted: bool = False, dies: bool = False, silent: bool = False) -> None:
        self.scored: list[list[int]] = []
        self.requests: list[GenerationRequest] = []
        self.aborted, self.dies, self.silent = aborted, dies, silent
        self.running = 0
        self._all = asyncio.Event()

    async def _wait(self) -> None:
        self.running += 1
        try:
            if len(self.scored) + len(self.requests) == len(TOKENS) + len(PROBE.places) and not self.silent:
                self._all.set()
            await self._all.wait()
        finally:
            self.running -= 1

    async def score(self, ids: list[int]) -> list[float]:
        self.scored.append(ids)
        await self._wait()
        return scores_of(PROBE)[TOKENS.index(ids)]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        index = len(self.requests) - 1
        await self._wait()
        if self.dies:
            raise EngineDied("rollouter/0", "gone")
        sample = samples_of(PROBE)[index]
        assert sample is not None
        if self.aborted and index % 5 == 0:
            yield TokenDelta(tokens=[], logprobs=[], finish_reason="abort")
        else:
            yield TokenDelta(tokens=[sample[0]], logprobs=[sample[1]], finish_reason="length")


def probe(engine: Asked):
    async def main():
        async with asyncio.timeout(5.0):
            return await probe_engine(engine, PROBE, version=4, temperature=0.7)

    return run_virtual(main())


def test_tokens_are_sampled_as_the_run_samples_them_and_all_at_once():
    engine = Asked()
    drift = probe(engine)
    assert drift.nats == pytest.approx(0.0)
    assert engine.scored == TOKENS
    assert len({request.id for request in engine.requests}) == len(PROBE.places)
    for request, (number, place) in zip(engine.requests, PROBE.places.tolist(), strict=True):
        assert request.prompt_ids == TOKENS[number][:place]
        assert (request.temperature, request.max_tokens, request.cache_salt) == (0.7, 1, "v4")
        assert request.priority < 0


def test_what_is_aborted_is_left_out():
    drift = probe(Asked(aborted=True))
    assert (drift.nats, drift.tokens) == (pytest.approx(0.0), 5 + 8)


@pytest.mark.parametrize(("engine", "error"), [(Asked(dies=True), EngineDied), (Asked(silent=True), TimeoutError)])
def test_nothing_goes_on_where_an_engine_dies_or_is_too_busy(engine, error):
    with pytest.raises(error):
        probe(engine)
    assert engine.running == 0

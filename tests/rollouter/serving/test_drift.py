"""The distance between two sets of log-probs, its consequences, and the question to an engine."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
from harness import until
from hypothesis import given
from hypothesis import strategies as st
from managed_engine import ManagedEngine, simulated
from probes import TOKENS, make_probe, samples_of, scores_of
from run_settings import simulated_run
from virtual import run_virtual

from asyncrl.config.monitor import DriftConfig
from asyncrl.core.errors import ConfigError, EngineDied, WeightsCorrupt
from asyncrl.core.truncation import Truncation
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import make_sets
from asyncrl.rollouter.engines.base import TokenDelta
from asyncrl.rollouter.serving.drift import (
    FAR,
    MIN_SAMPLES,
    NORMAL,
    QUANTIZED,
    ROUNDING,
    Drift,
    DriftLimits,
    Sample,
    explain,
    find_limits,
    judge,
    measure_drift,
    probe_engine,
)

PROBE = make_probe()


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=5), st.floats(-5, 5))
def test_the_drift_is_the_larger_of_both_sets(off, sampled):
    """The root mean square of the given ones and the mean of the sampled ones, in the measure of the first."""
    scores = [[-1.0 + off[0], -2.0 + off[1]], [-0.5 + off[2], -3.0 + off[3], -1.5 + off[4]]]
    drift = measure_drift(PROBE, scores, samples_of(PROBE, sampled))
    assert drift.scored == pytest.approx(math.sqrt(np.square(off).mean()), abs=1e-6)
    assert drift.sampled == pytest.approx(NORMAL * abs(sampled), abs=1e-6)
    assert drift.nats == max(drift.scored, drift.sampled)
    assert drift.worst == pytest.approx(max(*np.abs(off), abs(sampled)), abs=1e-6)
    assert drift.kl == pytest.approx(np.mean(np.expm1(off) - off), rel=1e-5, abs=1e-6)
    assert drift.tokens == 5 + 10


def test_tokens_without_a_log_prob_of_the_learner_and_unsampled_ones_are_left_out():
    samples = samples_of(PROBE, 0.2)
    samples[0], samples[1], samples[4] = Sample(99, -40.0), None, Sample(7, -1.6)
    drift = measure_drift(PROBE, scores_of(PROBE), samples)
    assert drift.sampled == pytest.approx(NORMAL * (7 * 0.2 + 0.6) / 8), "one that is far off is one of eight"
    assert drift.tokens == 5 + 8


@pytest.mark.parametrize(("places", "known"), [(MIN_SAMPLES - 1, False), (MIN_SAMPLES, True), (0, False)])
def test_a_few_sampled_tokens_are_not_enough(places, known):
    probe = make_probe(places)
    drift = measure_drift(probe, scores_of(probe), samples_of(probe, 0.5))
    assert drift.nats == pytest.approx(0.5 * NORMAL if known else 0.0)
    assert ("too few" in str(drift)) is not known


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_a_number_is_infinitely_far(value):
    scores, samples = scores_of(PROBE), samples_of(PROBE)
    scores[0][1] = value
    drift = measure_drift(PROBE, scores, samples)
    assert (drift.nats, drift.kl) == (FAR, FAR)
    assert judge(drift, find_limits(DriftConfig(warn=1.0, stop=FAR), float32=False)) == "stop"
    samples[3] = Sample(7, value)
    assert measure_drift(PROBE, scores_of(PROBE), samples).nats == FAR


def test_a_score_of_another_length_is_an_error():
    scores, samples = scores_of(PROBE), samples_of(PROBE)
    for wrong in ((scores[:1], samples), ([scores[0], scores[1][:-1]], samples), (scores, samples[1:])):
        with pytest.raises(ValueError, match="not those of the probe"):
            measure_drift(PROBE, *wrong)


@pytest.mark.parametrize(("nats", "verdict"), [(0.0999, "agrees"), (0.1, "warn"), (0.2999, "warn"), (0.3, "stop")])
def test_a_drift_warns_or_ends_the_run_by_its_size(nats, verdict):
    for scored, sampled in ((nats, None), (0.0, nats)):
        drift = Drift(scored=scored, sampled=sampled, worst=9.0, kl=0.0, tokens=64)
        assert judge(drift, DriftLimits(warn=0.1, stop=0.3)) == verdict


@pytest.mark.parametrize(
    ("configured", "warn", "stop"),
    [
        ({}, 0.12, 0.15),
        ({"warn": 0.05}, 0.05, 0.15),
        ({"stop": 0.05}, 0.05, 0.05),
        ({"warn": 0.5}, 0.5, 0.5),
        ({"warn": 0.2, "stop": 0.3}, 0.2, 0.3),
    ],
)
def test_missing_limits_follow_from_the_dtype_and_never_contradict_given_ones(configured, warn, stop):
    assert find_limits(DriftConfig(**configured), float32=False) == DriftLimits(warn=warn, stop=stop)
    assert find_limits(DriftConfig(), float32=True) == ROUNDING[True]
    quantized = find_limits(DriftConfig(), float32=False, quantized=True)
    assert quantized == QUANTIZED and quantized.warn > 2 * ROUNDING[False].warn
    assert find_limits(DriftConfig(stop=0.2), float32=False, quantized=True) == DriftLimits(warn=0.2, stop=0.2)


def test_a_run_does_not_stop_before_it_warns():
    with pytest.raises(ConfigError, match=r"drift\.stop: is 0\.1, below drift\.warn = 0\.2"):
        simulated_run(drift={"warn": 0.2, "stop": 0.1})


class Asked:
    """An engine that answers the probe with given exceptions, and only after every question."""

    def __init__(self, does=""):
        self.does, self.scored, self.requests, self.running = does, [], [], 0
        self._all = asyncio.Event()

    async def _wait(self):
        self.running += 1
        try:
            if len(self.scored) + len(self.requests) == len(TOKENS) + len(PROBE.places) and self.does != "hangs":
                self._all.set()
            await self._all.wait()
        finally:
            self.running -= 1

    async def score(self, ids):
        self.scored.append(ids)
        await self._wait()
        return scores_of(PROBE)[TOKENS.index(ids)]

    async def generate(self, request):
        self.requests.append(request)
        index = len(self.requests) - 1
        await self._wait()
        if self.does == "dies":
            raise EngineDied("rollouter/0", "gone")
        token, logprob, _ = samples_of(PROBE)[index]
        if self.does == "aborts" and index % 5 == 0:
            yield TokenDelta(tokens=[], logprobs=[], finish_reason="abort")
        elif self.does == "truncates":
            yield TokenDelta(tokens=[token], logprobs=[0.0], sets=make_sets([[token]]), finish_reason="length")
        else:
            yield TokenDelta(tokens=[token], logprobs=[logprob], finish_reason="length")


def probe(engine, truncation=None):
    async def main():
        async with asyncio.timeout(5.0):
            return await probe_engine(engine, PROBE, version=4, temperature=0.7, truncation=truncation)

    return run_virtual(main())


def test_probe_tokens_are_sampled_as_in_the_run_and_all_at_once():
    engine = Asked()
    assert probe(engine).nats == pytest.approx(0.0)
    assert engine.scored == TOKENS
    assert len({request.id for request in engine.requests}) == len(PROBE.places)
    for request, (number, place) in zip(engine.requests, PROBE.places.tolist(), strict=True):
        assert request.prompt_ids == TOKENS[number][:place]
        assert (request.temperature, request.max_tokens, request.cache_salt) == (0.7, 1, "v4")
        assert request.priority < 0
    drift = probe(Asked("aborts"))
    assert (drift.nats, drift.tokens) == (pytest.approx(0.0), 5 + 8), "aborted tokens are left out"


def test_tokens_of_truncated_distributions_are_compared_within_their_sets():
    """A token is left out if the learner does not know its whole set."""
    one, two, unknown = (np.array(members, np.int32) for members in ([7], [8, 7], [7, 9]))
    whole = math.log(math.exp(-1.0) + math.exp(-2.0))
    samples = [Sample(7, 0.2, one), Sample(7, -1.0 - whole + 0.2, two), Sample(8, -2.0 - whole + 0.2, two)] * 3
    drift = measure_drift(PROBE, scores_of(PROBE), [*samples, Sample(7, -9.0, unknown)])
    assert drift.sampled == pytest.approx(NORMAL * 0.2)
    assert drift.tokens == 5 + 9


def test_an_engine_that_truncates_and_returns_no_sets_is_infinitely_far():
    truncation = Truncation(top_k=1)
    engine = Asked("truncates")
    assert probe(engine, truncation).nats == pytest.approx(0.0)
    assert {request.truncation for request in engine.requests} == {truncation}
    assert measure_drift(make_probe(1), scores_of(PROBE), [Sample(7, math.nan)]).nats == FAR, "one is enough"
    drift = probe(Asked(), truncation)
    assert drift.nats == FAR and "whose token sets it does not return" in explain(drift)


@pytest.mark.parametrize(("does", "error"), [("dies", EngineDied), ("hangs", TimeoutError)])
def test_nothing_resumes_if_an_engine_dies_or_is_too_busy(does, error):
    engine = Asked(does)
    with pytest.raises(error):
        probe(engine)
    assert engine.running == 0


@pytest.mark.parametrize("keep_kv", ["recompute", "stale"])
def test_i4_no_kept_request_continues_under_refused_weights(keep_kv):
    """It continues under the other weights (I3), and is computed again once."""

    async def main():
        world = ManagedEngine(simulated(on_update="keep", keep_kv=keep_kv))
        manager, drifts = world.manager, [9.0, 0.0]

        async def drift(_probe):
            before = manager.sampled_tokens
            await asyncio.sleep(4.0)
            assert manager.sampled_tokens == before
            return Drift(scored=drifts.pop(0), sampled=None, worst=0.0, kl=0.0, tokens=5)

        manager.drift = drift
        await manager.start()
        await world.load(1)
        response = asyncio.create_task(world.response("0-1", 20))
        await until(lambda: manager.sampled_tokens == 5, "5 tokens")
        await manager.pause(2)
        await manager.load(SimpleNamespace(version=2))
        with pytest.raises(WeightsCorrupt):
            await manager.commit(PROBE, 1.0)
        assert (manager.version, manager.serves) == (1, False)
        await manager.load(SimpleNamespace(version=3))
        await manager.commit(PROBE, 1.0)
        [sequence] = (await response).sequences
        await manager.close()
        return sequence.spans, manager.reprefill.tokens, manager.running

    assert run_virtual(main()) == ([VersionSpan(1, 0, 5), VersionSpan(3, 5, 20)], 1 + 5, 0)

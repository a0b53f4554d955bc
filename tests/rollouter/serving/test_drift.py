"""How far two sets of log-probs are apart, and what follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probes import make_probe, samples_of, scores_of

from asyncrl.config.load import validate_config
from asyncrl.config.monitor import DriftConfig
from asyncrl.errors import ConfigError
from asyncrl.rollouter.serving.drift import (
    FAR,
    MIN_SAMPLES,
    NORMAL,
    ROUNDING,
    Drift,
    DriftLimits,
    find_limits,
    judge,
    measure_drift,
)

PROBE = make_probe()
LIMITS = DriftLimits(warn=0.1, stop=0.3)


def drift_of(scored: float = 0.0, sampled: float | None = 0.0) -> Drift:
    return Drift(scored=scored, sampled=sampled, worst=9.0, kl=0.0, tokens=64)


@pytest.mark.parametrize(
    ("scored", "sampled", "nats"),
    [(0.0, 0.0, 0.0), (0.2, 0.0, 0.2), (-0.2, 0.0, 0.2), (0.0, 0.2, 0.2 * NORMAL), (0.1, -0.4, 0.4 * NORMAL)],
)
def test_the_larger_of_both_sets_is_the_drift(scored, sampled, nats):
    drift = measure_drift(PROBE, scores_of(PROBE, scored), samples_of(PROBE, sampled))
    assert drift.nats == pytest.approx(nats)
    assert drift.worst == pytest.approx(max(abs(scored), abs(sampled)))
    assert drift.kl == pytest.approx(math.expm1(scored) - scored, abs=1e-12)
    assert drift.tokens == 5 + 10


def test_one_token_that_is_far_off_shows_among_those_that_are_given_and_not_among_those_that_are_sampled():
    scores, samples = scores_of(PROBE), samples_of(PROBE)
    scores[1][2] += 3.0
    samples[4] = (7, -1.35)
    drift = measure_drift(PROBE, scores, samples)
    assert drift.scored == pytest.approx(3.0 / math.sqrt(5))
    assert drift.sampled == pytest.approx(NORMAL * 0.35 / len(samples))
    assert drift.worst == pytest.approx(3.0)


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=5), st.floats(-5, 5))
def test_the_drift_lies_between_the_mean_and_the_worst_token(off, sampled):
    scores = [[-1.0 + off[0], -2.0 + off[1]], [-0.5 + off[2], -3.0 + off[3], -1.5 + off[4]]]
    drift = measure_drift(PROBE, scores, samples_of(PROBE, sampled))
    assert np.abs(off).mean() - 1e-6 <= drift.scored <= drift.worst + 1e-6
    assert drift.nats == max(drift.scored, drift.sampled or 0.0)
    assert drift.kl >= -1e-9


def test_what_the_learner_does_not_tell_of_and_what_was_not_sampled_is_left_out():
    samples = samples_of(PROBE, 0.2)
    samples[0], samples[1] = (99, -40.0), None
    drift = measure_drift(PROBE, scores_of(PROBE), samples)
    assert drift.sampled == pytest.approx(0.2 * NORMAL)
    assert drift.tokens == 5 + 8


def test_a_few_sampled_tokens_say_nothing():
    for places, known in ((MIN_SAMPLES - 1, False), (MIN_SAMPLES, True), (0, False)):
        probe = make_probe(places)
        drift = measure_drift(probe, scores_of(probe), samples_of(probe, 0.5))
        assert (drift.sampled is not None) is known
        assert drift.nats == pytest.approx(0.5 * NORMAL if known else 0.0)
    assert "too few" in str(drift)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_as_far_as_can_be(value):
    scores, samples = scores_of(PROBE), samples_of(PROBE)
    scores[0][1] = value
    drift = measure_drift(PROBE, scores, samples)
    assert (drift.nats, drift.kl) == (FAR, FAR)
    assert judge(drift, find_limits(DriftConfig(warn=1.0, stop=FAR), float32=False)) == "stop"
    samples[3] = (7, value)
    assert measure_drift(PROBE, scores_of(PROBE), samples).nats == FAR


def test_a_score_of_another_length_is_an_error():
    scores, samples = scores_of(PROBE), samples_of(PROBE)
    for wrong in ((scores[:1], samples), ([scores[0], scores[1][:-1]], samples), (scores, samples[1:])):
        with pytest.raises(ValueError, match="not those of the probe"):
            measure_drift(PROBE, *wrong)


@pytest.mark.parametrize(
    ("nats", "verdict"), [(0.0, "agrees"), (0.0999, "agrees"), (0.1, "warn"), (0.2999, "warn"), (0.3, "stop")]
)
def test_what_follows_from_a_drift(nats, verdict):
    assert judge(drift_of(scored=nats), LIMITS) == verdict
    assert judge(drift_of(sampled=nats), LIMITS) == verdict


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
def test_what_is_not_given_follows_from_the_dtype_and_never_contradicts_what_is(configured, warn, stop):
    assert find_limits(DriftConfig(**configured), float32=False) == DriftLimits(warn=warn, stop=stop)
    assert find_limits(DriftConfig(), float32=True) == ROUNDING[True]
    assert ROUNDING[True].stop < ROUNDING[False].warn


def test_a_run_does_not_stop_before_it_warns():
    with pytest.raises(ConfigError, match=r"drift\.stop: is 0\.1, below drift\.warn = 0\.2"):
        validate_config(
            {
                "rollout": {"engine": "sim"},
                "learner": {"backend": "sim"},
                "data": {"source": "synthetic"},
                "drift": {"warn": 0.2, "stop": 0.1},
            }
        )

"""How far two sets of log-probs are apart."""

import numpy as np
import pytest

from asyncrl.messages.weights import Probe
from asyncrl.rollouter.drift import TOLERANCE, measure_drift

PROBE = Probe(
    tokens=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
    logprobs=np.array([[-1.0, -2.0], [-0.5, -3.0]], np.float32),
)


@pytest.mark.parametrize(
    ("scores", "kl", "distance", "agrees"),
    [
        ([[-1.0, -2.0], [-0.5, -3.0]], 0.0, 0.0, True),
        ([[-1.02, -2.02], [-0.52, -3.02]], np.exp(-0.02) - 0.98, 0.02, True),
        # Errors of both signs do not cancel.
        ([[-0.5, -2.5], [-0.0, -3.5]], np.cosh(0.5) - 1, 0.5, False),
        ([[-3.0, -2.0], [-0.5, -3.0]], (np.exp(-2) + 1) / 4, 0.5, False),
    ],
)
def test_the_learner_and_an_engine_agree_to_within_rounding(scores, kl, distance, agrees):
    drift = measure_drift(PROBE, scores)
    assert drift.kl == pytest.approx(kl)
    assert drift.distance == pytest.approx(distance)
    assert drift.agrees is agrees
    assert (drift.distance <= TOLERANCE) is agrees


def test_a_score_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="inhomogeneous"):
        measure_drift(PROBE, [[-1.0], [-0.5, -3.0]])

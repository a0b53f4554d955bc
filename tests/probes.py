"""Probes of a few tokens."""

from __future__ import annotations

import numpy as np

from asyncrl.messages.weights import Probe
from asyncrl.rollouter.serving.drift import Sample

TOKENS = [[1, 2, 3], [4, 5, 6, 7]]
PLACES = 10


def make_probe(places: int = PLACES) -> Probe:
    """Two sequences. At each place token 7 has the log-prob -1, and token 8 has -2."""
    return Probe(
        tokens=np.array([token for sequence in TOKENS for token in sequence], np.int32),
        lengths=np.array([len(sequence) for sequence in TOKENS], np.int32),
        logprobs=np.array([-1.0, -2.0, -0.5, -3.0, -1.5], np.float32),
        places=np.array([[i % 2, 1 + i % 3] for i in range(places)], np.int32).reshape(places, 2),
        likeliest=np.array([[7, 8]] * places, np.int32).reshape(places, 2),
        likeliest_logprobs=np.array([[-1.0, -2.0]] * places, np.float32).reshape(places, 2),
    )


def scores_of(probe: Probe, off: float = 0.0) -> list[list[float]]:
    """An engine's answer whose log-probs are all ``off``."""
    ends = np.cumsum(probe.lengths - 1)[:-1]
    return [(part.astype(np.float64) + off).tolist() for part in np.split(probe.logprobs, ends)]


def samples_of(probe: Probe, off: float = 0.0) -> list[Sample | None]:
    """Tokens 7 and 8 in turn."""
    return [Sample(7 + i % 2, -1.0 - i % 2 + off) for i in range(len(probe.places))]

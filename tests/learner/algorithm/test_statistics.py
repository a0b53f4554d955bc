from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch

from asyncrl.learner.algorithm.objective import TokenSums, token_sums

CAP = 1.2


@pytest.mark.parametrize("fresh", [True, False])
def test_statistics_against_a_float64_reference(fresh) -> None:
    """Sums of two micro-batches together."""
    batches, total = [make_batch(1), make_batch(2)], TokenSums()
    for batch in batches:
        total.add(TokenSums(*token_sums(batch, fresh=fresh, cap=CAP).tolist()))

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name).detach().double().numpy() for batch in batches])

    keep = column("weights") > 0
    d = (column("logprobs") - column("behaviour"))[keep]
    r, new = np.exp(d), (column("staleness") == 0)[keep]
    assert new.any()
    k3 = r - 1 - d
    expected = {
        "policy/entropy": column("entropies")[keep].mean(),
        "policy/ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "policy/behaviour_kl": k3.mean(),
        "policy/tis_clipped_fraction": (r > CAP).mean(),
        "policy/ratio_max": r.max(),
    }
    if fresh:
        expected |= {"policy/engine_kl": k3[new].mean(), "policy/engine_kl_tokens": new.sum()}
    assert total.metrics() == pytest.approx(expected, rel=1e-6)


def test_there_is_no_number_without_tokens_nor_an_infinite_one() -> None:
    assert TokenSums().metrics() == {}
    assert "policy/engine_kl" not in TokenSums(count=1, ratio=1, ratio_squared=1).metrics()
    batch = make_batch(1, dtype=torch.float32)
    far = replace(batch, behaviour=batch.behaviour - 1e4)
    sums = TokenSums(*token_sums(far, fresh=True, cap=CAP).tolist())
    assert all(math.isfinite(value) for value in sums.metrics().values())

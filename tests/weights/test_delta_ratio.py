"""The benchmark of deltas between real optimizer steps."""

from __future__ import annotations

import pytest

from tools.bench.delta_ratio import delta_ratio


@pytest.mark.slow
def test_larger_steps_change_more_and_cost_more() -> None:
    found = delta_ratio((1e-6, 1e-4), steps=2, width=64)
    assert set(found) == {"1e-06", "0.0001"}
    small, large = found["1e-06"], found["0.0001"]
    for name in ("first_ratio", "last_ratio", "median_ratio", "first_changed", "last_changed"):
        assert 0 < small[name] < large[name] < 1
    assert small["bytes"] == large["bytes"] > 0

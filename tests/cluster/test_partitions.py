"""Two hosts of which one cannot reach the other, while both reach the head.

test_ports_without_keys.py has the other direction.
"""

from __future__ import annotations

import pytest
from cluster.lost import launched as launched

from tools.waiting import wait_until

UNREACHABLE_S = 4.0


@pytest.mark.timeout(600)
def test_i1_i5_a_rollouter_that_the_reward_pool_cannot_reach_is_fenced_and_the_run_continues(cluster, launched):
    """It beats, and holds leases that it cannot finish and must not keep."""
    run = launched(132, unreachable_s=UNREACHABLE_S, max_restarts=3)
    run.wait_for_step(5)
    pool = run.host_of("reward/0")
    cut = next(name for name in ("a", "b", "c") if name != pool)
    (away,) = (name for name in (f"rollouter/{i}" for i in range(4)) if run.host_of(name) == cut)
    cluster[pool].drop_to(cluster[cut])
    wait_until(lambda: f"{away} died" in run.shown, f"an end of {away}", 60.0)
    run.wait_for_step(16)
    cluster[pool].deliver_to(cluster[cut])
    run.is_exact()
    reported = run.shown
    assert "could not reach reward/0" in reported, reported
    for other in range(4):
        assert (f"rollouter/{other} died" in reported) == (f"rollouter/{other}" == away), reported
    assert "reward/0 died" not in reported
    run.is_gone_from("a", "b", "c")

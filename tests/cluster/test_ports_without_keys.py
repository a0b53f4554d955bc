"""A run without keys. Actors restart at the ports of their predecessors: hosts are lost and cut off from each other.

Old connections then lead to a successor, and only the messages on them show which actor is there.
"""

from __future__ import annotations

import pytest
from cluster.lost import launched as launched

from tools.waiting import wait_until

PORTS = "7000-7015"
UNREACHABLE_S = 4.0


@pytest.mark.timeout(600)
def test_i1_successors_at_the_ports_of_lost_actors_replace_them(cluster, launched):
    flags = ("--security.curve", "off", "--network.ports", PORTS)
    run = launched(240, *flags, host_grace_s=60.0, unreachable_s=UNREACHABLE_S, max_restarts=3)
    run.wait_for_step(5)
    # Every actor has connections to the pool.
    lost = run.host_of("reward/0")
    cut = next(name for name in ("a", "b", "c") if name != lost)
    of_host = {run.host_of(name): name for name in (f"rollouter/{index}" for index in range(4))}
    were_lost, fenced = ("reward/0", of_host[lost]), of_host[cut]
    low, _, high = PORTS.partition("-")
    for (address,) in map(run.addresses, (*were_lost, fenced)):
        assert int(low) <= int(address.rpartition(":")[2]) <= int(high)

    def wait_for_successor(name: str) -> None:
        wait_until(lambda: len(run.addresses(name)) == 2, f"a new {name}", 60.0)

    cluster[lost].cut_off()
    run.wait_for("host is lost")
    cluster[lost].reconnect()
    run.wait_for("host is back")
    for name in were_lost:
        wait_for_successor(name)
    run.wait_for_step(8)

    cluster[cut].drop_to(cluster[lost])
    wait_until(lambda: f"{fenced} died" in run.shown, f"an end of {fenced}", 60.0)
    cluster[cut].deliver_to(cluster[lost])
    wait_for_successor(fenced)
    run.wait_for_step(8)

    # The two of one host may have swapped places.
    first, second = zip(*map(run.addresses, were_lost), strict=True)
    assert set(first) == set(second)
    assert len(set(run.addresses(fenced))) == 1
    run.is_exact()
    reported = run.shown
    assert f"dead with it: reward/0, {of_host[lost]}\n" in reported
    assert f"{fenced} died (killed by SIGKILL: it could not reach reward/0" in reported
    run.is_gone_from("a", "b", "c")

"""A run without keys, whose actors are started again at the ports of their predecessors: hosts are lost and cut apart.

Old connections then lead to a successor, and nothing but what is said over them tells it from who was there before.
"""

from __future__ import annotations

import pytest
from cluster.test_host_lost import launched as launched

from tools.cluster.netns import wait_until

PORTS = "7000-7015"
UNREACHABLE_S = 4.0


@pytest.mark.timeout(600)
def test_i1_successors_at_the_ports_of_the_lost_and_the_fenced_take_their_places(cluster, launched):
    flags = ("--security.curve", "off", "--network.ports", PORTS)
    run = launched(steps=240, flags=flags, host_grace_s=60.0, unreachable_s=UNREACHABLE_S, max_restarts=3)
    run.wait_for_step(5)
    pool = run.host_of("reward/0")
    lost, cut = (name for name in ("a", "b", "c") if name != pool)
    of_host = {run.host_of(name): name for name in (f"rollouter/{index}" for index in range(4))}
    before = {name: run.addresses(name) for name in of_host.values()}
    low, _, high = PORTS.partition("-")
    for (address,) in before.values():
        assert int(low) <= int(address.rpartition(":")[2]) <= int(high)

    def is_back(name: str) -> bool:
        return len(run.addresses(name)) == 2

    cluster[lost].cut_off()
    run.wait_for("host is lost")
    run.wait_for_step(run.step + 8)
    cluster[lost].reconnect()
    run.wait_for("host is back")
    wait_until(lambda: is_back(of_host[lost]), f"a new {of_host[lost]}", 60.0)

    cluster[cut].drop_to(cluster[pool])
    wait_until(lambda: f"{of_host[cut]} died" in run.out.read_text(), f"an end of {of_host[cut]}", 60.0)
    cluster[cut].deliver_to(cluster[pool])
    wait_until(lambda: is_back(of_host[cut]), f"a new {of_host[cut]}", 60.0)
    run.wait_for_step(run.step + 8)

    for host in (lost, cut):
        assert run.addresses(of_host[host]) == 2 * before[of_host[host]]
    run.is_exact()
    told = run.out.read_text()
    assert f"dead with it: {of_host[lost]}\n" in told
    assert "could not reach reward/0" in told
    run.is_gone_from("a", "b", "c")

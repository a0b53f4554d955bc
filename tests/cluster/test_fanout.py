"""Weights over real networks of hosts: a killed relay costs no version, and the hosts leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.bench.fanout import Setting, config, fleet
from tools.bench.fanout_host import name_of
from tools.cluster.netns import REPOSITORY
from tools.cluster.network import ShapedNetwork, why_no_shaped_network
from tools.waiting import wait_until

SETTING = Setting(hosts=8, bytes_per_s=2e6, size=5 << 20, chunk_bytes=64 << 10, deadline_s=16.0)
"""Half of a version takes longer than a process may stand still: a relay is killed once it has half of one."""
WAIT_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def shaped() -> None:
    if reason := why_no_shaped_network():
        pytest.skip(f"there can be no hosts here: {reason}")


def middle(assigned: dict[int, list[str]]) -> int:
    """The host in the middle of the chain: it has others before it and behind it."""
    behind = Counter(name for sources in assigned.values() for name in sources)
    named = [host for host in assigned if assigned[host] and behind[name_of(host)]]
    return sorted(named, key=lambda host: (len(assigned[host]), -behind[name_of(host)]))[len(named) // 2]


@pytest.mark.timeout(600)
def test_killed_relays_cost_no_version_and_relay_again_after_a_restart() -> None:
    async def main() -> None:
        with ShapedNetwork(SETTING.hosts + 1, bytes_per_s=SETTING.bytes_per_s) as network:
            async with fleet(network, config(SETTING)) as hosts:
                victims = set()
                for _ in range(2):
                    version = await hosts.publish(SETTING.size, hosts.receivers, WAIT_S)
                    assigned = await hosts.assigned(version, hosts.receivers, WAIT_S)
                    victim = middle(assigned)
                    victims.add(victim)
                    assert any(name_of(victim) in way for ways in assigned.values() for way in ways)
                    await hosts.until("half", version, [victim], WAIT_S)
                    await hosts.kill(victim)
                    survivors = [host for host in hosts.receivers if host != victim]
                    await hosts.served(version, survivors, WAIT_S)
                    assert hosts.serving(version, [victim]) == []
                    await hosts.start([victim])
                version = await hosts.publish(SETTING.size, hosts.receivers, WAIT_S)
                await hosts.served(version, hosts.receivers, WAIT_S)
                # A restarted relay is equal to any other: it may be a relay again, or get its chunks from others.
                assert victims <= set(hosts.serving(version, hosts.receivers))

    asyncio.run(main())


def marked(mark: str) -> set[int]:
    """The processes that have this in their environment."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path("/proc", entry, "environ").read_bytes():
                    found.add(int(entry))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_benchmark_leaves_nothing_at_any_end(number: signal.Signals) -> None:
    mark = f"ASYNCRL_TEST_MARK={os.getpid()}-{number.name}"
    name, _, value = mark.partition("=")
    bench = subprocess.Popen(
        [sys.executable, "-m", "tools.bench", "fanout", "--hosts", "3"],
        cwd=REPOSITORY,
        env=os.environ | {name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The bench below its first process and its warden, a holder for each host and for the switch, and a process on
        # each host.
        wait_until(lambda: len(marked(mark)) == 3 + 5 + 4, "the hosts", WAIT_S)
        bench.send_signal(number)
        bench.wait(WAIT_S)
        wait_until(lambda: not marked(mark), "all processes to be gone", WAIT_S)
    finally:
        bench.kill()
        bench.wait(WAIT_S)

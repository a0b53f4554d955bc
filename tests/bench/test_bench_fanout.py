"""The benchmark of fan-out at a small size, with its real hosts, and the relay that it kills."""

import asyncio

import pytest

from tools.bench.fanout import Setting, measure_setting, middle
from tools.bench.report import Report
from tools.cluster.network import why_no_shaped_network

SMALL = Setting(hosts=4, bytes_per_s=4e6, size=1 << 20, chunk_bytes=64 << 10, deadline_s=16.0, pairs=1)


def test_copies_and_a_death_are_measured_and_no_version_is_lost():
    if reason := why_no_shaped_network():
        pytest.skip(f"there can be no hosts here: {reason}")
    report = Report("fanout")
    asyncio.run(measure_setting(report, SMALL))
    assert report.ratios["versions_lost"] == 0
    # A version that crosses the cable takes as long as the cable.
    assert report.figures["cable"]["one_host_over_it"] > 0.9
    # The killed relay has hosts before it and behind it.
    assert report.figures["relay_killed"]["hosts_behind_it"] == [1]
    assert report.figures["relay_killed"]["seconds"][0] > SMALL.size / SMALL.bytes_per_s * 0.9
    assert report.ratios["all_vs_one"] == report.figures["all_vs_one"]["ratio"]["median"] > 0


A, B, C, D = (f"rollouter/{index}" for index in range(4))


@pytest.mark.parametrize(
    ("offered", "killed"),
    [
        ({1: [], 2: [A], 3: [B, A]}, 2),
        ({1: [], 2: [A], 3: [B, A], 4: [C, B, A]}, 3),
        ({3: [], 1: [C], 4: [A, C]}, 1),
    ],
    ids=["three hosts", "four hosts", "in another order"],
)
def test_the_killed_relay_is_in_the_middle_of_the_chain(offered, killed):
    assert middle(offered) == killed

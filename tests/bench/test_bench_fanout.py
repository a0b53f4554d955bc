"""The benchmark of fan-out at a small size, with its real hosts."""

import asyncio

import pytest

from tools.bench.fanout import Setting, measure_setting
from tools.bench.report import Report
from tools.cluster.network import why_no_shaped_network

SMALL = Setting(hosts=4, bytes_per_s=4e6, size=1 << 20, chunk_bytes=64 << 10, deadline_s=16.0, pairs=1)


def test_copies_to_all_hosts_and_to_one_are_measured():
    if reason := why_no_shaped_network():
        pytest.skip(f"there can be no hosts here: {reason}")
    report = Report("fanout")
    asyncio.run(measure_setting(report, SMALL))
    # A version that crosses the cable takes as long as the cable.
    assert report.figures["cable"]["one_host_over_it"] > 0.9
    assert report.ratios["all_vs_one"] == report.figures["all_vs_one"]["ratio"]["median"] > 0

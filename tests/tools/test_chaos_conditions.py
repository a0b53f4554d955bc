"""Hosts, links and clocks under the faults that go on: as if each were alone, and as ever once they are over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.chaos.conditions import Conditions, conditions, directions, queue
from tools.chaos.plan import ON_HOSTS, Link, draw

HOSTS = ("head", "a", "b")
faults_on_hosts = st.builds(
    lambda seed, count: draw(seed, count, [], ON_HOSTS, hosts=HOSTS, silence_s=3.0),
    st.integers(0, 2**32 - 1),
    st.integers(0, 30),
)


@pytest.mark.parametrize(
    ("victim", "swallowed"),
    [("a-b", {("a", "b"), ("b", "a")}), ("a>b", {("a", "b")}), ("b>head", {("b", "head")})],
)
def test_a_partition_swallows_what_goes_one_way_or_both(victim, swallowed):
    assert set(directions(victim)) == swallowed


def test_nothing_is_wrong_without_faults():
    assert conditions([]) == Conditions()


@given(faults_on_hosts, st.randoms())
def test_nothing_is_wrong_once_all_are_over_and_each_goes_on_until_it_is(faults, randomness):
    ending = list(faults)
    randomness.shuffle(ending)
    going_on = list(faults)
    for over in ending:
        now = conditions(going_on)
        for fault in going_on:
            if fault.kind == "partition":
                assert now.deaf >= set(directions(fault.victim))
            if fault.kind == "slow":
                assert fault.victim in now.slow
        assert len(now.deaf) <= sum(2 for fault in going_on if fault.kind == "partition")
        for host in HOSTS:
            alone = [fault for fault in going_on if fault.victim == host]
            assert now.ahead_s.get(host, 0.0) == pytest.approx(sum(fault.ahead_s for fault in alone))
            links = [fault.link for fault in alone if fault.link is not None]
            assert now.slow.get(host) == (links[-1] if links else None)
        going_on = [fault for fault in going_on if fault is not over]
    assert conditions(going_on) == Conditions()


def test_a_link_is_a_queue_of_the_kernel():
    link = Link(delay_ms=40.0, rate_mbit=2.5, loss=0.015)
    assert queue(link, netem=True) == "netem delay 40.0ms loss 1.50% rate 2.500mbit"
    assert queue(link, netem=False) == "tbf rate 2.500mbit burst 256kbit latency 90.0ms"

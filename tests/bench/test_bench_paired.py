"""Order of measurement and the intervals of medians."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.paired import compare, measure_pairs, median_interval

values = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(values)
def test_the_interval_holds_the_median_and_is_the_same_each_time(data):
    found = median_interval(data)
    assert found.low <= found.median <= found.high
    assert found.median == pytest.approx(float(np.median(data)))
    assert min(data) <= found.low <= found.high <= max(data)
    assert found == median_interval(data)


@pytest.mark.parametrize("data", [[], [1.0, math.nan], [math.inf]])
def test_what_has_no_median_is_refused(data):
    with pytest.raises(ValueError, match="no median"):
        median_interval(data)


def test_pairs_alternate_and_both_sides_are_warmed_up():
    calls = []

    def side(name):
        async def once():
            calls.append(name)
            return float(len(calls))

        return once

    pairs = asyncio.run(measure_pairs(side("a"), side("b"), 4))
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert pairs == [(3.0, 4.0), (6.0, 5.0), (7.0, 8.0), (10.0, 9.0)]


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=20))
def test_the_ratio_is_of_each_pair_and_turns_over_with_its_sides(pairs):
    found, turned = compare(pairs), compare([(b, a) for a, b in pairs])
    assert found.pairs == len(pairs)
    assert found.ratio.median == pytest.approx(float(np.median([a / b for a, b in pairs])))
    if len(pairs) % 2:
        assert found.ratio.median == pytest.approx(1 / turned.ratio.median)


def test_a_drift_of_the_machine_cancels_out():
    state = {"now": 1.0}

    async def slower_each_time():
        state["now"] *= 1.02
        return state["now"]

    pairs = asyncio.run(measure_pairs(slower_each_time, slower_each_time, 30))
    assert compare(pairs).ratio.holds(1.0)

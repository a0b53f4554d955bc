"""Order of measurement, the intervals of medians, and the lines that a report prints."""

import asyncio
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.paired import compare, measure_pairs, median_interval
from tools.bench.report import Report, Target

PAIRS = [(1.0, 2.0), (1.1, 2.0), (0.9, 2.0)]
MANY = {"max_size": 20, "min_size": 1}


@given(st.lists(st.floats(1e-6, 1e6), **MANY), st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), **MANY))
def test_an_interval_contains_the_median_and_each_pair_has_one_ratio(data, pairs):
    found = median_interval(data)
    assert min(data) <= found.low <= found.median <= found.high <= max(data)
    assert found.median == pytest.approx(float(np.median(data)))
    assert found == median_interval(data)
    ratio, turned = compare(pairs), compare([(b, a) for a, b in pairs])
    assert ratio.pairs == len(pairs)
    assert ratio.ratio.median == pytest.approx(float(np.median([a / b for a, b in pairs])))
    assert len(pairs) % 2 == 0 or ratio.ratio.median == pytest.approx(1 / turned.ratio.median)


@pytest.mark.parametrize("data", [[], [1.0, math.nan], [math.inf]])
def test_values_without_a_median_are_refused(data):
    with pytest.raises(ValueError, match="no median"):
        median_interval(data)


def test_pairs_alternate_so_that_drift_cancels_out_and_both_sides_are_warmed_up():
    calls = []

    def side(name, growth):
        async def once():
            calls.append(name)
            return growth ** len(calls)

        return once

    asyncio.run(measure_pairs(side("a", 1.0), side("b", 1.0), 4))
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    pairs = asyncio.run(measure_pairs(side("a", 1.02), side("b", 1.02), 30))
    assert compare(pairs).ratio.holds(1.0)


def test_the_json_is_one_line_with_the_ratios_last(capsys):
    report = Report("calls", settings={"n": 3})
    report.comparison("row", compare(PAIRS), unit="s", sides=("ours", "floor"), target=Target("<=", 0.6))
    report.comparison("aside", compare(PAIRS), unit="s", sides=("ours", "other"))
    report.same("row", compare([(1.0, 1.0), (1.1, 1.0), (1.0, 1.1)]))
    text = report.to_json()
    assert "\n" not in text
    found = json.loads(text)
    assert list(found) == ["bench", "machine", "settings", "figures", "targets", "met", "ratios"]
    assert (found["ratios"], found["targets"], found["met"]) == ({"row": 0.5}, {"row": "<= 0.6"}, {"row": True})
    assert (found["figures"]["row"]["ratio"]["median"], found["figures"]["row"]["pairs"]) == (0.5, 3)
    assert found["figures"]["row_aa"]["holds_1"] is True
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 4
    assert [Target(">=", 2).met(ratio) for ratio in (2.0, 1.9)] == [True, False]
    assert [Target("<=", 0.5).met(ratio) for ratio in (0.5, 0.51)] == [True, False]

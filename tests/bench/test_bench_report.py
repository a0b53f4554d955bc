"""Lines that the report prints."""

import json

import pytest

from tools.bench.paired import compare
from tools.bench.report import Report, Target

PAIRS = [(1.0, 2.0), (1.1, 2.0), (0.9, 2.0)]


@pytest.mark.parametrize(
    ("target", "ratio", "met"),
    [
        (Target("<=", 0.5), 0.5, True),
        (Target("<=", 0.5), 0.51, False),
        (Target(">=", 2), 2.0, True),
        (Target(">=", 2), 1.9, False),
    ],
)
def test_targets(target, ratio, met):
    assert target.met(ratio) is met


def test_the_json_is_one_line_with_the_ratios_last(capsys):
    report = Report("calls", settings={"n": 3})
    report.comparison("row", compare(PAIRS), unit="s", sides=("ours", "floor"), target=Target("<=", 0.6))
    report.comparison("aside", compare(PAIRS), unit="s", sides=("ours", "other"))
    report.same("row", compare([(1.0, 1.0), (1.1, 1.0), (1.0, 1.1)]))
    text = report.to_json()
    assert "\n" not in text
    found = json.loads(text)
    assert list(found) == ["bench", "machine", "settings", "figures", "targets", "met", "ratios"]
    assert found["ratios"] == {"row": 0.5}
    assert found["targets"] == {"row": "<= 0.6"}
    assert found["met"] == {"row": True}
    assert found["figures"]["row"]["ratio"]["median"] == 0.5
    assert found["figures"]["row"]["pairs"] == 3
    assert found["figures"]["row_aa"]["holds_1"] is True
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 3

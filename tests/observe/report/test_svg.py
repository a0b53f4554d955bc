"""Charts as SVG: everything that is drawn is in its frame, and stands where its value is."""

import html
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.observe.report.svg import BOTTOM, LEFT, MINUTES, RIGHT, TOP, Curve, Panel, draw, ticks

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def parsed(panel):
    """The picture as XML, which wants its attributes quoted."""
    text = draw(panel).replace(" hidden", "")
    return ET.fromstring(re.sub(r'(\s[a-zA-Z-]+)=([^"\s>]+)', r'\1="\2"', text))


def tooltip_data(panel):
    return json.loads(html.unescape(re.search(r'data-told="([^"]*)"', draw(panel))[1]))


def coordinates(path):
    """Absolute points of a path that has no bars."""
    return [tuple(map(float, point.split(","))) for point in re.findall(r"-?[\d.]+,-?[\d.]+", path.get("d"))]


def drawn(panel):
    return [path for svg in parsed(panel).iter("svg") if svg.get("class") == "plot" for path in svg.iter("path")]


@given(
    st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=20, unique_by=lambda point: point[0]),
    st.sampled_from(["", "bars", "areas"]),
    st.booleans(),
)
def test_all_finite_values_are_drawn_within_the_frame(points, stack, zero):
    points.sort()
    x, *ys = zip(*points, strict=True)
    if stack:
        ys = [[abs(y) for y in values] for values in ys]
    curves = [Curve(name=f"{n}", colour="#000", x=x, y=y) for n, y in enumerate(ys)]
    panel = Panel(curves=curves, stack=stack, zero=zero, widths=[1.0] * len(x) if stack == "bars" else ())
    width, height = panel.width - LEFT - RIGHT, panel.height - TOP - BOTTOM
    for path in drawn(panel):
        for across, down in coordinates(path):
            assert -0.01 <= across <= width + 0.01 and -0.01 <= down <= height + 0.01
        assert "nan" not in path.get("d") and "inf" not in path.get("d")
    for text in parsed(panel).iter("text"):
        assert "nan" not in (text.text or "") and len(text.text or "") <= 16
    assert [len(curve["x"]) for curve in tooltip_data(panel)["curves"]] == [len(x)] * 2


def test_a_point_has_the_position_of_its_value():
    curve = Curve(name="loss", colour="#000", x=[0, 5, 10], y=[0.0, 1.0, 0.5])
    panel = Panel(curves=[curve], width=int(LEFT + RIGHT) + 1020, height=int(TOP + BOTTOM) + 210)
    (path,) = drawn(panel)
    # A hundredth of the width is left free on both sides, and a twentieth of the height above.
    assert coordinates(path) == [(10.0, 210.0), (510.0, 10.0), (1010.0, 110.0)]
    assert tooltip_data(panel)["curves"] == [
        {"name": "loss", "colour": "#000", "notes": [], "x": [0, 5, 10], "y": [0, 1, 0.5]}
    ]


def test_labels_differ_from_their_neighbours():
    for low, span in ((0.0, 1.0), (1.00001, 2e-5), (12_345.0, 3.0), (0.0, 20_000.0), (-1e-300, 2e-300)):
        curve = Curve(name="c", colour="#000", x=[1, 2], y=[low, low + span])
        labels = [
            text.text for text in parsed(Panel(curves=[curve], zero=False)).iter("text") if text.get("class") == "y"
        ]
        assert len(labels) == len(set(labels)) > 2


def test_areas_are_stacked_and_shares_fill_the_frame():
    curves = [Curve(name=name, colour="#000", x=[0, 1], y=y) for name, y in (("a", [0.25, 0.5]), ("b", [0.75, 0.5]))]
    a, b = drawn(Panel(curves=curves, stack="areas", shares=True, height=int(TOP + BOTTOM) + 100))
    assert [down for _, down in coordinates(a)] == [75.0, 50.0, 100.0, 100.0]
    assert [down for _, down in coordinates(b)] == [0.0, 0.0, 50.0, 75.0]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_few_and_inside(low, span, most):
    assume(span > 1e-6 * abs(low))
    found = ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    assert len(found) >= most // 3


@pytest.mark.parametrize(
    ("low", "high", "steps", "found"),
    [
        (0.0, 1.0, (), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]),
        (3.0, 41.0, (), [10.0, 20.0, 30.0, 40.0]),
        (100.0, 370.0, MINUTES, [120.0, 180.0, 240.0, 300.0, 360.0]),
    ],
)
def test_ticks(low, high, steps, found):
    assert ticks(low, high, 5, steps) == found

"""The clock of the benchmark of the quickstart."""

import pytest

from tools.bench.__main__ import parser
from tools.bench.quickstart import Point, seconds_until

CURVE = [Point(0, 0.0, 0.3), Point(5, 10.0, 0.5), Point(10, 18.0, 0.45), Point(15, 30.0, 0.85)]


@pytest.mark.parametrize(
    ("accuracy", "seconds"),
    [(0.2, 0.0), (0.3, 0.0), (0.4, 5.0), (0.5, 10.0), (0.65, 24.0), (0.85, 30.0), (0.86, None)],
)
def test_it_is_there_when_the_line_through_the_points_first_is(accuracy, seconds):
    assert seconds_until(accuracy, CURVE) == (None if seconds is None else pytest.approx(seconds))


def test_the_command_names_its_other_side(capsys):
    chosen = parser().parse_args(["quickstart", "--vs", "trl", "--seed", "2", "--seed", "5"])
    assert (chosen.seed, chosen.accuracy, chosen.steps) == ([2, 5], 0.8, 40)
    with pytest.raises(SystemExit):
        parser().parse_args(["quickstart"])
    assert "--vs" in capsys.readouterr().err

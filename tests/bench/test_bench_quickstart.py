"""The clock of the benchmark of the quickstart."""

from pathlib import Path

import pytest

from asyncrl.config.load import validate_config
from asyncrl.reward.functions import BUILT_IN
from tools.asset_cache import Assets
from tools.bench.quickstart import TASKS, Point, cost_until, ratio, waited_for_engine
from tools.live_run import quickstart
from tools.quickstart.task import Problem, is_right

ASSETS = Assets(Path("x"))
CURVE = [Point(0, 0.0, 0.3), Point(5, 10.0, 0.5), Point(10, 18.0, 0.45), Point(15, 30.0, 0.85)]


@pytest.mark.parametrize(
    ("accuracy", "seconds"),
    [(0.2, 0.0), (0.3, 0.0), (0.4, 5.0), (0.5, 10.0), (0.65, 24.0), (0.85, 30.0), (0.86, None)],
)
def test_the_target_is_reached_at_the_first_interpolated_crossing(accuracy, seconds):
    assert cost_until(accuracy, CURVE) == (None if seconds is None else pytest.approx(seconds))


WITHOUT_DOTS = ["7+5=12;2", "7+5=12;12", "12", ";12", ""]


@pytest.mark.parametrize(
    ("lengths", "response"),
    [(lengths, response) for lengths in TASKS for response in WITHOUT_DOTS]
    + [("lognormal", "7+5=12;12.."), ("lognormal", "7+5=12;12.1")],
)
def test_training_and_evaluation_use_the_same_reward(lengths, response):
    config = validate_config(quickstart(ASSETS, TASKS[lengths].keys))
    reward = BUILT_IN[config.reward.function](**config.reward.options)
    problem = Problem(7, 5)
    assert reward(completion=response, row={"answer": problem.answer}) == is_right(response, problem)


def test_the_longest_response_fits_into_the_model():
    for task in TASKS.values():
        assert validate_config(quickstart(ASSETS, task.keys)).longest_sequence <= task.settings.positions


@pytest.mark.parametrize(("began", "seconds"), [(2.5e6, 1.5), (0.5e6, 0.0)])
def test_the_first_step_counts_from_the_start_of_generation(began, seconds):
    """Not from the start of the wait: the engine's start is not part of a step."""
    events = [
        {"name": "wait for groups", "ts": 1e6},
        {"name": "generate v0", "ts": began + 1e5},
        {"name": "generate v0", "ts": began},
        {"name": "wait for groups", "ts": 9e6},
    ]
    assert waited_for_engine(events) == seconds


def test_a_side_that_never_reaches_the_target_loses_its_pair():
    assert ratio(2.0, 3.0) == 1.5
    assert (ratio(None, 3.0), ratio(2.0, None), ratio(None, None)) == (0.0, float("inf"), None)

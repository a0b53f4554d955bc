"""The pauses between repeats; and a peer that does not answer is worth a warning, one that ends is not."""

import random
import statistics

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.runtime.calls.retry import CANCELLED, DOUBLINGS, log_away, pause

firsts = st.floats(0.001, 100.0)
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(firsts, st.integers(0, 10_000), draws)
def test_a_pause_is_above_nothing_and_bounded(first_s, times, draw):
    assert 0.0 < pause(first_s, times, draw) <= first_s * 2**DOUBLINGS


@given(firsts, st.integers(0, 10_000), draws)
def test_pauses_double_with_each_time_up_to_the_bound(first_s, times, draw):
    """For the same draw."""
    growth = pause(first_s, times + 1, draw) / pause(first_s, times, draw)
    assert abs(growth - (2.0 if times < DOUBLINGS else 1.0)) < 1e-9


@given(st.integers(0, 2**32), st.integers(0, 10))
def test_pauses_are_spread_over_all_of_their_range_and_the_same_for_the_same_source(seed, times):
    def drawn():
        source = random.Random(seed)
        return [pause(1.0, times, source.random()) / pause(1.0, times, 0.0) for _ in range(2000)]

    found = drawn()
    assert found == drawn()
    assert abs(statistics.fmean(found) - 0.5) < 0.05
    assert min(found) < 0.02 and max(found) > 0.98


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (RemoteError("dataloader/0", CANCELLED, "the call was cancelled", retryable=True), "info"),
        (RemoteError("dataloader/0", "restore_needed", "not yet", retryable=True), "warning"),
        (DeadlineExceeded("learner/0", "dataloader/0", "Outcomes", 30.0, "the call is not answered"), "warning"),
    ],
)
def test_only_who_is_ending_is_no_trouble(error, level):
    with structlog.testing.capture_logs() as logged:
        log_away(structlog.get_logger(), "dataloader", error, uid="0-1")
    assert logged == [{"event": "dataloader is away", "error": str(error), "uid": "0-1", "log_level": level}]
